"""Snapshots of a server's pool: the documented snippet, run on stand-ins of 0.5.23's objects."""

import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from shadowkv_lab.errors import BadFile, OutOfRange
from shadowkv_lab.kernels.reference import FP8, to_fp8
from shadowkv_lab.model import load_model
from shadowkv_lab.server import snapshot as sglang_snapshot
from shadowkv_lab.sources import formats

GLM = load_model("glm-5")
LENS, LAYERS, SLOTS = (5, 9), 3, 65


def server_rows(storage, layer):
    generator = torch.Generator().manual_seed(layer)
    rows = torch.randn(SLOTS, 576, generator=generator).bfloat16()
    if storage == "packed":
        return formats.pack(rows, 512)[:, None]
    return (to_fp8(rows).view(torch.uint8) if storage == "fp8" else rows)[:, None]


def server(storage, first_layer=0):
    """A scheduler and a batch with what the snippet touches."""
    table = torch.zeros(4, 32, dtype=torch.int32)  # row 0 is SGLang's padding row
    slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(9))[: sum(LENS)] + 1
    table[3, : LENS[0]], table[1, : LENS[1]] = slots[: LENS[0]], slots[LENS[0] :]
    dtype = torch.bfloat16 if storage == "bf16" else FP8
    pool = SimpleNamespace(
        kv_buffer=[server_rows(storage, n) for n in range(LAYERS)],
        dtype=dtype,
        start_layer=first_layer,
        page_size=1,
    )
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )
    reqs = [
        SimpleNamespace(kv=SimpleNamespace(holds_kv=True, req_pool_idx=row, kv_committed_len=n))
        for row, n in zip((3, 1), LENS, strict=True)
    ]
    batch = SimpleNamespace(reqs=reqs, forward_mode=SimpleNamespace(is_decode=lambda: True))
    return scheduler, batch, slots.long()


def snap(path, monkeypatch, storage="fp8", rank=0, **options):
    scheduler, batch, slots = server(storage, **options)
    monkeypatch.setenv("SHADOWKV_SNAPSHOT", str(path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    parallel = SimpleNamespace(tp_rank=rank)
    code = textwrap.dedent(sglang_snapshot.SNIPPET)
    exec(code, {"self": scheduler, "batch": batch, "get_parallel": lambda: parallel})
    return slots


@pytest.mark.parametrize("storage", ["fp8", "bf16", "packed"])
def test_the_snippet_and_its_conversion_are_exact(tmp_path, monkeypatch, storage):
    slots = snap(tmp_path / "snap.pt", monkeypatch, storage, first_layer=2)
    assert [p.name for p in tmp_path.iterdir()] == ["snap.pt"]
    seen = []
    file = sglang_snapshot.convert(
        tmp_path / "snap.pt",
        GLM,
        tmp_path / "pool",
        storage,
        progress=lambda text, done: seen.append(done),
    )
    assert (file.storage, file.lens, file.layers, file.page_size) == (storage, LENS, (2, 3, 4), 1)
    assert "SGLang snapshot snap.pt, 2 requests" in file.metadata["source"] and seen[-1] == 1.0
    for n in range(LAYERS):
        wanted = server_rows(storage, n)[slots, 0]
        assert torch.equal(file.stored(n).view(torch.uint8), wanted.view(torch.uint8))


def test_the_snippet_writes_once_on_one_rank_and_is_short(tmp_path, monkeypatch):
    snap(tmp_path / "other", monkeypatch, rank=1)
    monkeypatch.setenv("SHADOWKV_SNAPSHOT_TOKENS", "1000")
    snap(tmp_path / "other", monkeypatch)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("SHADOWKV_SNAPSHOT_TOKENS")
    (tmp_path / "there").write_text("old")
    snap(tmp_path / "there", monkeypatch)
    assert (tmp_path / "there").read_text() == "old"
    assert len(sglang_snapshot.SNIPPET.strip().splitlines()) <= 17


def content(storage="fp8", **changes):
    """A whole pool as a dictionary of tensors, as one would write it without the snippet."""
    scheduler, _, _ = server(storage)
    found = {f"kv_buffer.{n}": server_rows(storage, n) for n in range(LAYERS)}
    table = scheduler.req_to_token_pool.req_to_token[[3, 1]]
    return {**found, "req_to_token": table, "lens": torch.tensor(LENS), **changes}


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_a_whole_pool_in_either_form(tmp_path, save):
    save(content(), tmp_path / "x")
    snapshot = sglang_snapshot.load(tmp_path / "x", GLM)
    _, _, slots = server("fp8")
    assert torch.equal(snapshot.rows(1).view(torch.uint8), server_rows("fp8", 1)[slots, 0])


# Bad snapshots


@pytest.mark.parametrize(
    "declared, storage", [("fp8", "packed"), ("packed", "fp8"), ("fp8", "bf16")]
)
def test_rows_declared_as_what_they_are_not(tmp_path, declared, storage):
    save_file(content(storage), tmp_path / "x")
    with pytest.raises(OutOfRange, match=f"are {storage} rows, but were declared {declared}"):
        sglang_snapshot.load(tmp_path / "x", GLM, declared)


def test_a_width_that_the_model_cannot_have(tmp_path):
    save_file(content(), tmp_path / "x")
    other = replace(GLM, name="other", kv_lora_rank=256)
    with pytest.raises(OutOfRange, match=r"576.*320 values.*for other"):
        sglang_snapshot.load(tmp_path / "x", other)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"lens": torch.tensor([5, 40])}, BadFile, "do not fit"),
        ({"lens": torch.tensor([5, 0])}, BadFile, "do not fit"),
        ({"lens": torch.tensor([1, 1, 1])}, BadFile, "do not fit"),
        ({"req_to_token": torch.full((2, 32), SLOTS)}, OutOfRange, f"slot {SLOTS}"),
        ({"req_to_token": torch.full((2, 32), -1)}, OutOfRange, "slot -1"),
        ({"kv_buffer.99": torch.zeros(4, 1, 576, dtype=torch.uint8)}, BadFile, "layer 99"),
        ({"kv_buffer.2": torch.zeros(4, 1, 576).bfloat16()}, OutOfRange, "mixes bf16, fp8"),
    ],
)
def test_a_snapshot_that_contradicts_itself(tmp_path, change, error, match):
    save_file(content(**change), tmp_path / "x")
    with pytest.raises(error, match=match):
        sglang_snapshot.load(tmp_path / "x", GLM).rows(0)


def test_files_that_are_no_snapshot(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "a")
    torch.save([1, 2], tmp_path / "b")
    (tmp_path / "c").write_bytes(b"PK\x03\x04 and nothing more")
    for name, match in (
        ("a", "no snapshot"),
        ("b", "holds list"),
        ("c", "cannot be read"),
        ("none", "cannot be read"),
    ):
        with pytest.raises(BadFile, match=match):
            sglang_snapshot.load(tmp_path / name, GLM)


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/never-written-by-a-snapshot", "w"))


def test_no_code_is_unpickled(tmp_path):
    torch.save({**content(), "extra": Evil()}, tmp_path / "x")
    with pytest.raises(BadFile, match="weights_only=True"):
        sglang_snapshot.load(tmp_path / "x", GLM)


@pytest.mark.parametrize("dtype", ["torch.float8_e5m2", "torch.float8_e4m3fnuz"])
def test_another_fp8(tmp_path, dtype):
    torch.save({**content(), "dtype": dtype}, tmp_path / "x")
    with pytest.raises(OutOfRange, match=dtype):
        sglang_snapshot.load(tmp_path / "x", GLM)


def test_nan_bytes_are_not_converted(tmp_path):
    bad = server_rows("fp8", 1)
    bad[:, 0, 3] = 0x7F
    save_file(content(**{"kv_buffer.1": bad}), tmp_path / "x")
    with pytest.raises(OutOfRange, match="Layer 1, token 0"):
        sglang_snapshot.convert(tmp_path / "x", GLM, tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""A checkpoint's first layers as a model: only their tensors, from only their shards.

GLM-5 has 744B parameters, but its first three layers are dense: their latents need the embedding
and three layers, 4.3 GB of BF16. BF16, F16 and F32 tensors are read as they are, block-FP8 ones
(DeepSeek, GLM-5-FP8) are dequantised; every other quantisation is refused by name.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from shadowkv_lab.errors import BadFile, CannotRun, OutOfRange
from shadowkv_lab.files import read_json
from shadowkv_lab.model import Model
from shadowkv_lab.model import load_model as model_of
from shadowkv_lab.sources.tensorfile import TensorFile

ARCHITECTURES = ("GlmMoeDsaForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")
BLOCK = 128  # both sides of a block that shares one weight_scale_inv
READABLE = ("F32", "F16", "BF16")
REFUSED = {".gguf": "GGUF", ".bin": "pickled", ".pt": "pickled", ".pth": "pickled"}
log = logging.getLogger("shadowkv_lab.sources")


@dataclass(frozen=True)
class Loaded:
    """A model of the first layers, and what was read for it."""

    model: torch.nn.Module  # a transformers ...ForCausalLM
    shape: Model  # of the whole model
    layers: int  # how many of its layers were loaded
    shards: tuple[str, ...]  # files that were opened
    loaded_bytes: int  # of the model's tensors
    sha256: str  # over config.json and the tensors read


@dataclass
class Shards:
    """The safetensors files of a folder, opened as their tensors are asked for."""

    directory: Path
    shard_of: dict[str, str]
    method: str  # the quantisation's name, for messages
    opened: dict[str, TensorFile] = field(default_factory=dict)
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def __contains__(self, name: str) -> bool:
        return name in self.shard_of

    def _file(self, name: str) -> TensorFile:
        shard = self.shard_of[name]
        if shard not in self.opened:
            path = self.directory / shard
            if Path(shard).name != shard or not os.path.isfile(path):  # nothing outside the folder
                raise BadFile(
                    f"The index puts {name} into {shard:.80}, which is not in "
                    f"{self.directory.name}",
                    remedy="Download that shard, or the whole checkpoint again",
                )
            self.opened[shard] = TensorFile(path)
            log.info("opened %s", shard)
        if name not in self.opened[shard]:
            raise BadFile(
                f"The index puts {name} into {shard}, but that shard lacks it",
                remedy="Index and shards are of different checkpoints; download both again",
            )
        return self.opened[shard]

    def _raw(self, name: str) -> torch.Tensor:
        tensor = self._file(name).read(name)
        self.digest.update(name.encode() + memoryview(tensor.view(torch.uint8).flatten().numpy()))
        return tensor

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A weight in `dtype`; raises `BadFile` or `BadFile`."""
        if name not in self.shard_of:
            packed = [n for n in self.shard_of if n.startswith(name.removesuffix("weight"))]
            if name.endswith("weight") and packed:
                raise self._refuse(name, "as " + ", ".join(n.split(".")[-1] for n in packed[:4]))
            raise BadFile(f"No shard has {name}", remedy="The checkpoint does not fit its config")
        entry = self._file(name).entry(name)
        if entry.dtype in READABLE:
            return self._raw(name).to(dtype)
        scale = f"{name}_scale_inv"
        if entry.dtype != "F8_E4M3" or scale not in self.shard_of:
            raise self._refuse(name, f"as {entry.dtype} without weight_scale_inv")
        blocks = tuple(-(-n // BLOCK) for n in entry.shape)
        scales = self._file(scale).entry(scale)
        if len(blocks) != 2 or scales.shape != blocks or scales.dtype not in READABLE:
            raise self._refuse(name, f"with {scales.dtype} scales {scales.shape}, not F32 {blocks}")
        return dequantise(self._raw(name), self._raw(scale).float(), dtype)

    def _refuse(self, name: str, how: str) -> BadFile:
        return BadFile(
            f"{name} is quantised by {self.method}: stored {how}",
            "BF16 (F16, F32) tensors, and FP8 ones with weight_scale_inv per 128 x 128 block",
            "Ask for fewer layers (in GLM-5-NVFP4 layers 0-2 are BF16), or use a BF16 checkpoint",
        )


def dequantise(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight` [N, K] e4m3 times `scales` [N/128, K/128], a row of blocks at a time."""
    out = torch.empty(weight.shape, dtype=dtype)
    wide = scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    for block, row in enumerate(wide):
        span = slice(block * BLOCK, (block + 1) * BLOCK)
        out[span] = weight[span].float() * row
    return out


def open_shards(directory: Path | str) -> tuple[Shards, dict]:
    """The folder's index and config; opens no shard. Raises what is wrong with the folder."""
    directory = Path(directory)
    model_of(directory)  # raises BadFile
    config = require_no_code(directory / "config.json")
    method = quantisation(directory, config)
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file():
        shard_of = read_json(index, _Index).weight_map
    elif single.is_file():
        shard_of = dict.fromkeys(TensorFile(single).entries, single.name)
    else:
        others = {REFUSED[p.suffix] for p in directory.iterdir() if p.suffix in REFUSED}
        if others:
            raise BadFile(
                f"{directory.name} holds {', '.join(sorted(others))} weights only",
                "safetensors shards",
                "Use the model's safetensors release",
            )
        raise BadFile(f"{directory.name} has no {index.name} and no {single.name}")
    return Shards(directory, shard_of, method), config


def require_no_code(path: Path) -> dict:
    """A folder's JSON; raises `BadFile` if it asks for Python files of that folder to be run."""
    found = read_json(path)
    if code := found.get("auto_map"):
        names = code.values() if isinstance(code, dict) else [code]
        raise BadFile(
            f"{path} needs code of its own: auto_map names {', '.join(map(str, names))}"[:300],
            "checkpoints that transformers itself can read; the lab runs no code of a model folder",
            "If transformers knows this architecture, take auto_map out of a copy of the file",
        )
    return found


@dataclass(frozen=True)
class _Index:
    """`model.safetensors.index.json`: the shard of each tensor."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class _Quantised:
    """modelopt's `hf_quant_config.json`."""

    quantization: dict


def quantisation(directory: Path, config: dict) -> str:
    """The checkpoint's quantisation method; raises `BadFile` for unread ones.

    modelopt passes here: its NVFP4 checkpoints keep attention and dense MLPs in BF16, and a tensor
    that is not is refused when it is read.
    """
    found = config.get("quantization_config") or {}
    method = str(found.get("quant_method", "")).lower()
    if not found and (extra := directory / "hf_quant_config.json").is_file():
        method = f"modelopt {read_json(extra, _Quantised).quantization.get('quant_algo', '')}"
    block = found.get("weight_block_size", [BLOCK, BLOCK])
    if method.split(" ")[0] not in ("", "fp8", "modelopt") or block != [BLOCK, BLOCK]:
        raise BadFile(
            f"{directory.name} is quantised by {method}, blocks {block}",
            "none, fp8 in blocks of 128 x 128, modelopt layers that stayed BF16",
            "Use the model's BF16 or FP8 release",
        )
    return f"{method or 'an unnamed method'} {found.get('quant_algo', '')}".strip()


def load_model(
    directory: Path | str,
    layers: int | None = None,
    *,
    head: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> Loaded:
    """The first `layers` layers of a checkpoint (None: all) as a transformers model.

    Without `head` the final norm and the output head are left out, so that only `model.model`
    can run. Memory stays within the loaded tensors and one more of them.
    """
    shards, raw = open_shards(directory)
    shape = model_of(directory)
    layers = shape.layers if layers is None else layers
    if not 1 <= layers <= shape.layers:
        raise OutOfRange(f"{layers} layers of {shape.name}", f"1 to {shape.layers}")
    model = _empty_model(raw, shape.layers, layers)
    if not head:
        model.model.norm, model.lm_head = torch.nn.Identity(), torch.nn.Identity()
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    shards.digest.update((Path(directory) / "config.json").read_bytes())
    wanted, state = model.state_dict(), {}
    for done, (name, empty) in enumerate(wanted.items()):
        progress(f"loading {name}", done / len(wanted))
        kind = torch.float32 if any(part in name for part in strict) else dtype
        try:
            state[name] = _tensor(shards, name, empty.shape, kind).to(device)
        except BadFile as error:
            raise BadFile(str(error)) from None
        if state[name].shape != empty.shape:
            raise BadFile(f"{name} has shape {tuple(state[name].shape)}", f"{tuple(empty.shape)}")
    model.load_state_dict(state, assign=True)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config).to(
        device
    )  # its buffers are no weights
    size = sum(t.nbytes for t in state.values())
    opened = tuple(sorted(shards.opened))
    log.info(
        "%s: %d of %d layers, %.2f GB, from %s",
        shape.name,
        layers,
        shape.layers,
        size / 1e9,
        ", ".join(opened),
    )
    return Loaded(model.eval(), shape, layers, opened, size, shards.digest.hexdigest())


def _tensor(shards: Shards, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A state tensor; transformers fuses the experts' matrices, checkpoints keep them apart."""
    prefix, _, kind = name.rpartition(".")
    if name in shards or kind not in ("gate_up_proj", "down_proj"):
        return shards.read(name, dtype)
    out = torch.empty(shape, dtype=dtype)
    for e in range(shape[0]):
        read = partial(lambda e, part: shards.read(f"{prefix}.{e}.{part}.weight", dtype), e)
        if kind == "down_proj":
            out[e] = read("down_proj")
        else:
            half = shape[1] // 2
            out[e, :half], out[e, half:] = read("gate_proj"), read("up_proj")
    return out


def _empty_model(raw: dict, total: int, layers: int) -> torch.nn.Module:
    """The truncated model on the meta device, without memory."""
    try:
        import transformers
    except ImportError as error:
        raise CannotRun(
            f"transformers cannot be imported ({error})", remedy="pip install 'shadowkv-lab[lab]'"
        ) from None
    name = next((a for a in raw.get("architectures") or () if a in ARCHITECTURES), None)
    if name is None:
        raise BadFile(f"Architecture {raw.get('architectures')}", ", ".join(ARCHITECTURES))
    kind = getattr(transformers, name)
    config = kind.config_class.from_dict(
        {k: v for k, v in raw.items() if k not in ("quantization_config", "model_type")}
    )
    for key, value in list(vars(config).items()):  # indexer_types, mlp_layer_types, layer_types
        if isinstance(value, list) and len(value) == total:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return kind(config)

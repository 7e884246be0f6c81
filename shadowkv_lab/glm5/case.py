"""The case's own numbers: derived again, where they do not add up, and an independent check."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.deployment import GIB
from shadowkv_lab.errors import NoAnswer, OutOfRange
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.steps.fit import Fit
from shadowkv_lab.steps.predict import at, predict_at
from shadowkv_lab.steps.step import Step, replays

PAGE = 64  # SGLang's page for DSA models; its dummy page is cast with the rest of the buffer


def published(name: str) -> dict:
    """One file of data/published."""
    return facts.find("published", "published result", name)


@dataclass(frozen=True)
class Line:
    """One derived figure. `published` is None where nobody published it; `note` says why not."""

    what: str
    formula: str
    value: float
    unit: str
    published: float | None = None
    note: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether the published figure is this one, rounded to the digits that it has."""
        return None if self.published is None else within_rounding(self.value, self.published)


def within_rounding(value: float, printed: float) -> bool:
    """Whether `value`, rounded to the last digit of `printed`, is `printed` (to half a digit)."""
    text = repr(printed)
    decimals = len(text.split(".")[1]) if "." in text and not text.endswith(".0") else 0
    return abs(value - printed) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def arithmetic() -> list[Line]:
    """Table 1: each step of the case's arithmetic, from its published inputs."""
    case = published("case")
    model = load_model(case["model"])
    before, after, cast = case["before"], case["after"], case["cast_ms"]
    rows = case["pool_tokens"] + PAGE
    a_row = model.row_bytes("fp8") + model.row_bytes("bf16")
    layer_mb = rows * a_row / 1e6
    step_gb = layer_mb * model.layers / 1e3
    t0, t1 = before["tpot_ms"], after["tpot_ms"]
    share = case["cast_share_of_decode"]
    return [
        Line(
            "cast, a layer",
            f"({case['pool_tokens']:,} + {PAGE} dummy) rows x {a_row:,} B",
            layer_mb,
            "MB",
            case["cast_mb_per_layer"],
        ),
        Line("cast, a step", f"{layer_mb:.1f} MB x {model.layers} layers", step_gb, "GB"),
        Line("speed of the cast", f"{step_gb:.1f} GB / {cast} ms", step_gb / cast, "TB/s"),
        Line("tokens/s before", f"1000 / {t0} ms", 1000 / t0, "tok/s", before["tokens_per_s"]),
        Line("tokens/s after", f"1000 / {t1} ms", 1000 / t1, "tok/s", after["tokens_per_s"]),
        Line("gain", f"{t0} / {t1} - 1", 100 * (t0 / t1 - 1), "%", round(100 * after["gain"])),
        Line(
            "cast's share of the TPOT",
            f"{cast} / {t0}",
            100 * cast / t0,
            "%",
            None,
            f"{share:.0%} is reported of decode: {cast} / {share} = {cast / share:.1f} ms, so "
            f"about {t0 - cast / share:.1f} ms of the TPOT lie outside what was profiled",
        ),
        Line("all but the cast", f"{t0} - {cast}", t0 - cast, "ms"),
        Line("tokens/s without a cast", f"1000 / {t0 - cast:.1f} ms", 1000 / (t0 - cast), "tok/s"),
        Line("gone by the patch", f"{t0} - {t1}", t0 - t1, "ms"),
        Line("of the cast", f"{t0 - t1:.1f} / {cast}", 100 * (t0 - t1) / cast, "%"),
        Line("unexplained", f"{t1} - {t0 - cast:.1f}", t1 - (t0 - cast), "ms"),
    ]


def author_estimate() -> pd.DataFrame:
    """The author's estimate of a BF16 pool beside the lab's, and the reason why they differ."""
    case = published("case")
    model = load_model(case["model"])
    fp8, bf16 = model.token_bytes("fp8"), model.token_bytes("bf16")
    room = case["pool_gib"] * GIB
    return pd.DataFrame(
        [
            dict(
                what="BF16 pool of as many tokens (GiB)",
                author=float(case["authors_bf16_pool_gb"]),
                lab=case["pool_gib"] * bf16 / fp8,
                why="his GB are the log's GiB, doubled; the index keys do not double",
            ),
            dict(
                what="tokens of a BF16 pool in the same room",
                author=float(case["authors_bf16_pool_tokens"]),
                lab=float(room // bf16),
                why=f"{bf16:,} B a token, not 2 x {fp8:,}: an index key is "
                f"{model.row_bytes('index')} B a layer either way",
            ),
        ]
    )


@dataclass(frozen=True)
class Server:
    """What a user knows of a server before and after its patch; the case's own by default."""

    before_ms: float
    after_ms: float
    cast_ms: float
    pool_tokens: int
    model: Model
    weights_gib: float
    layers: int

    @property
    def cast_gb(self) -> float:
        row = self.model.row_bytes("fp8") + self.model.row_bytes("bf16")
        return self.pool_tokens * row * self.layers / 1e9

    @property
    def still_ms(self) -> float:
        """How much of the cast is still in the step afterwards, if nothing else has changed."""
        return self.cast_ms - (self.before_ms - self.after_ms)

    def gib(self, storage: str, tokens: float | None = None, layers: int | None = None) -> float:
        """Rows of one storage, without index keys."""
        tokens, layers = tokens or self.pool_tokens, self.layers if layers is None else layers
        return tokens * layers * self.model.row_bytes(storage) / GIB

    @property
    def index_gib(self) -> float:
        row = self.model.row_bytes("index") if self.model.dsa else 0
        return self.pool_tokens * self.model.index_layers * row / GIB


def server(
    before_ms: float | None = None,
    after_ms: float | None = None,
    pool_tokens: int | None = None,
    layers: int | None = None,
    *,
    cast_ms: float | None = None,
    model: str = "glm-5",
    weights_gib: float | None = None,
) -> Server:
    """A user's own server; what is left out is the case's, a cast scaled from it by bytes.

    Raises `OutOfRange` for a time or size that is none, `NoAnswer` where the cast alone is
    longer than the step.
    """
    case = published("case")
    geometry = load_model(model)
    pool_tokens = case["pool_tokens"] if pool_tokens is None else pool_tokens
    layers = geometry.layers if layers is None else layers
    if cast_ms is None:
        of_case = case["pool_tokens"] * load_model(case["model"]).layers
        cast_ms = case["cast_ms"] * pool_tokens * layers / of_case
    found = Server(
        case["before"]["tpot_ms"] if before_ms is None else before_ms,
        case["after"]["tpot_ms"] if after_ms is None else after_ms,
        cast_ms,
        pool_tokens,
        geometry,
        case["weights_gib"] if weights_gib is None else weights_gib,
        layers,
    )
    for name in ("before_ms", "after_ms", "pool_tokens", "layers", "weights_gib", "cast_ms"):
        value = getattr(found, name)
        if not (math.isfinite(value) and value > 0):
            raise OutOfRange(f"{name} of {value}", "a finite number above 0")
    if found.before_ms < found.cast_ms:
        raise NoAnswer(
            f"A TPOT of {found.before_ms:.1f} ms is less than its own cast of {cast_ms:.1f} ms: "
            "the cast alone is longer than the step",
            f"a TPOT of {cast_ms:.1f} ms or more, or a measured cast_ms",
            "Check the pool and the layers; a card faster than the case's casts in less time",
        )
    return found


def check_deepseek(fitted: Fit, measured: Sequence[Step]) -> pd.DataFrame:
    """Table 5: sglang #35291's figures beside the lab's for the same geometry on an H200."""
    issue = published("sglang-35291")
    model, P = load_model(issue["model"]), issue["pool_tokens"]
    gpu = machine.card(issue["gpu"])
    context = round((1 - issue["share_not_referenced"]) * P)
    wanted = ("full_cast", model.name, P, gpu.name)
    casts = [
        s["cast"].ms
        for s in replays(measured)
        if (s.strategy.label, s.setting.model.name, s.setting.pool_tokens, s.card) == wanted
    ]
    full = predict_at("full_cast", at(model, P, 1, context), gpu, fitted=fitted)
    cast, source = full["cast"].ms, str(full["cast"].provenance)
    if casts:
        cast, source = statistics.median(casts), "recorded"
    small = issue["bf16_pool"]["pool_tokens"]
    bf16 = predict_at("bf16_pool", at(model, small, 1, context), gpu, fitted=fitted)
    whole = cast + full.ms - full["cast"].ms
    base = issue["step_ms"] - whole
    rows = [
        ("cast, a step (ms)", cast, issue["cast_ms"], source),
        ("cast, a layer (us)", 1000 * cast / model.layers, issue["cast_us_per_layer"], source),
        ("full cast's whole step (ms)", whole, None, str(full.provenance)),
        ("the server's step less that: base (ms)", base, None, str(full.provenance)),
        (
            f"BF16 pool of {small:,}: base + its step (ms)",
            base + bf16.ms,
            issue["bf16_pool"]["step_ms"],
            str(bf16.provenance),
        ),
    ]
    table = pd.DataFrame(rows, columns=["what", "lab", "reported", "provenance"])
    table["off_percent"] = 100 * (table.lab / table.reported.astype(float) - 1)
    return table.assign(context=context)

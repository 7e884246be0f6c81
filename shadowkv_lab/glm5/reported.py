"""The reported numbers re-derived, what does not add up, and an independent check."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.deployment import GIB
from shadowkv_lab.errors import NoAnswer, OutOfRange
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.provenance import Provenance, calibrated
from shadowkv_lab.steps.fit import Fit
from shadowkv_lab.steps.predict import at, predict_at
from shadowkv_lab.steps.step import Step, replays

REPORT = "glm5-report"
PAGE = 64  # SGLang's page for DSA models; its dummy page is cast with the rest of the buffer
DERIVED = calibrated("arithmetic over published figures")


def published(name: str = REPORT) -> dict:
    """One file of data/published."""
    return facts.find("published", "published result", name)


@dataclass(frozen=True)
class Line:
    """One derived figure. `published` is None where the report does not give it.

    `value` is arithmetic over published figures: calibrated, never recorded.
    """

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

    @property
    def provenance(self) -> Provenance:
        return DERIVED


def within_rounding(value: float, printed: float) -> bool:
    """Whether `value`, rounded to the last digit of `printed`, is `printed` (to half a digit)."""
    text = repr(printed)
    decimals = len(text.split(".")[1]) if "." in text and not text.endswith(".0") else 0
    return abs(value - printed) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def arithmetic() -> list[Line]:
    """Table 1: each step of the report's arithmetic, from its published inputs."""
    report, of = published(), server()
    before, after, cast = report["before"], report["after"], report["cast_ms"]
    rows = report["pool_tokens"] + PAGE
    a_row = of.model.row_bytes("fp8") + of.model.row_bytes("bf16")
    layer_mb = rows * a_row / 1e6
    step_gb = layer_mb * of.layers / 1e3
    t0, t1 = before["tpot_ms"], after["tpot_ms"]
    share, shadow = report["cast_share_of_decode"], of.gib("bf16")
    weights, free = report["weights_gib"], report["free_before_gib"]
    whole = report["pool_gib"] + shadow + weights
    fraction = report["mem_fraction_static"]
    return [
        Line(
            "cast per layer",
            f"({report['pool_tokens']:,} + {PAGE} dummy) rows x {a_row:,} B",
            layer_mb,
            "MB",
            report["cast_mb_per_layer"],
        ),
        Line("cast per step", f"{layer_mb:.1f} MB x {of.layers} layers", step_gb, "GB"),
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
            f"the report says {share:.0%} of decode: {cast} / {share} = {cast / share:.1f} ms, so "
            f"about {t0 - cast / share:.1f} ms of the TPOT lie outside what was profiled",
        ),
        Line("all but the cast", f"{t0} - {cast}", t0 - cast, "ms"),
        Line("tokens/s without a cast", f"1000 / {t0 - cast:.1f} ms", 1000 / (t0 - cast), "tok/s"),
        Line("gone with the patch", f"{t0} - {t1}", t0 - t1, "ms"),
        Line("share of the cast that went", f"{t0 - t1:.1f} / {cast}", 100 * (t0 - t1) / cast, "%"),
        Line("unexplained", f"{t1} - {t0 - cast:.1f}", t1 - (t0 - cast), "ms"),
        Line(
            "weights by SGLang's rule",
            f"{fraction} x {free} - {report['pool_gib']}",
            fraction * free - report["pool_gib"],
            "GiB",
            None,
            f"the report says about {weights}; that {free} GiB were free before loading is assumed",
        ),
        Line(
            "a shadow of the whole pool",
            f"{report['pool_tokens']:,} x {of.model.row_bytes('bf16'):,} B x {of.layers} layers",
            shadow,
            "GiB",
        ),
        Line(
            "with the FP8 pool and the weights",
            f"{shadow:.1f} + {report['pool_gib']} + {weights}",
            whole,
            "GiB",
            None,
            f"it does not fit a card of {machine.card(report['gpu'][-1]).memory_gib:.1f} GiB",
        ),
    ]


def author_estimate() -> pd.DataFrame:
    """The author's estimate of a BF16 pool beside the lab's, and the reason why they differ."""
    report = published()
    model = load_model(report["model"])
    fp8, bf16 = model.token_bytes("fp8"), model.token_bytes("bf16")
    room = report["pool_gib"] * GIB
    return pd.DataFrame(
        [
            dict(
                what="BF16 pool of as many tokens (GiB)",
                author=float(report["authors_bf16_pool_gb"]),
                lab=report["pool_gib"] * bf16 / fp8,
                why="the author doubled the log's GiB; the index keys do not double",
            ),
            dict(
                what="tokens of a BF16 pool in the same room",
                author=float(report["authors_bf16_pool_tokens"]),
                lab=float(room // bf16),
                why=f"{bf16:,} B per token, not 2 x {fp8:,}: an index key is "
                f"{model.row_bytes('index')} B per layer either way",
            ),
        ]
    )


@dataclass(frozen=True)
class Server:
    """What a user knows of a server before and after its patch.

    `kv_gib` is the memory of its pool (None: that of its slots), `free_gib` what was free before
    its weights were loaded (None: the whole card).
    """

    before_ms: float
    after_ms: float
    cast_ms: float
    pool_tokens: int
    model: Model
    weights_gib: float
    layers: int
    kv_gib: float | None = None
    free_gib: float | None = None

    @property
    def bare_ms(self) -> float:
        """The step before without its cast."""
        return self.before_ms - self.cast_ms

    @property
    def cast_gb(self) -> float:
        row = self.model.row_bytes("fp8") + self.model.row_bytes("bf16")
        return self.pool_tokens * row * self.layers / 1e9

    @property
    def still_ms(self) -> float:
        """How much of the cast is still in the step afterwards, if nothing else has changed."""
        return self.cast_ms - (self.before_ms - self.after_ms)

    def tpot_ms(self, shadowed: float, pool_tokens: float) -> float:
        """The step with `shadowed` layers over a pool of another size: the other layers are cast in
        full, as fast as before."""
        left = (1 - shadowed / self.layers) * pool_tokens / self.pool_tokens
        return self.bare_ms + self.cast_ms * left

    def pool_gib(self, shadowed: float = 0, pool_tokens: float | None = None) -> float:
        """The FP8 pool, its index keys, and the shadow of `shadowed` layers."""
        tokens = self.pool_tokens if pool_tokens is None else pool_tokens
        return tokens * self.token_bytes(shadowed) / GIB

    def token_bytes(self, shadowed: float = 0) -> float:
        """Bytes per token of the FP8 pool, its index keys, and the shadow of some layers."""
        index = self.model.index_layers * self.model.row_bytes("index") if self.model.dsa else 0
        rows = self.layers * self.model.row_bytes("fp8") + shadowed * self.model.row_bytes("bf16")
        return index + rows

    def gib(self, storage: str) -> float:
        """Rows of one storage, without index keys."""
        return self.pool_tokens * self.layers * self.model.row_bytes(storage) / GIB

    def room_gib(self, card: machine.Card) -> float:
        """What the weights leave of the card; CUDA graphs and activations come out of it too."""
        return min(card.memory_gib, self.free_gib or math.inf) - self.weights_gib


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
    """A user's own server; what is left out is the report's, a cast scaled from it by bytes.

    Raises `OutOfRange` for a time or size that is not positive and finite, `NoAnswer` where the
    cast alone is longer than the step.
    """
    report = published()
    geometry = load_model(model)
    pool_tokens = report["pool_tokens"] if pool_tokens is None else pool_tokens
    layers = geometry.layers if layers is None else layers
    if cast_ms is None:
        reported = report["pool_tokens"] * load_model(report["model"]).layers
        cast_ms = report["cast_ms"] * pool_tokens * layers / reported
    same_pool = (geometry.name, pool_tokens) == (report["model"], report["pool_tokens"])
    found = Server(
        report["before"]["tpot_ms"] if before_ms is None else before_ms,
        report["after"]["tpot_ms"] if after_ms is None else after_ms,
        cast_ms,
        pool_tokens,
        geometry,
        report["weights_gib"] if weights_gib is None else weights_gib,
        layers,
        report["pool_gib"] if same_pool and layers == geometry.layers else None,
        report["free_before_gib"],
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
            "Check the pool and the layers; a card faster than the report's casts in less time",
        )
    return found


def faster_cast(measured: Sequence[Step]) -> pd.DataFrame:
    """What a faster kernel can gain: on each of the report's cards the cast as reported and the
    time that its bytes alone take, on an H200 torch's cast and the lab's as recorded."""
    of, rows = server(), []
    for name in published()["gpu"]:
        card = machine.card(name)
        floor = 1e3 * of.cast_gb / card.bandwidth_gb_per_s
        rows.append(
            dict(
                card=card.title,
                cast_ms=of.cast_ms,
                fastest_ms=floor,
                gain=of.cast_ms / floor,
                how=f"{of.cast_gb:.1f} GB at the datasheet's {card.bandwidth_gb_per_s:,.0f} GB/s: "
                "at most",
                provenance=str(DERIVED),
            )
        )
    setting = (of.model.name, of.pool_tokens, "h200")
    casts = {
        name: [
            s["cast"].ms
            for s in replays(measured)
            if (s.setting.model.name, s.setting.pool_tokens, s.card) == setting
            and s.strategy.label == name
        ]
        for name in ("full_cast", "vector_cast")
    }
    if all(casts.values()):
        slow, fast = map(statistics.median, casts.values())
        speed = of.cast_gb / slow, of.cast_gb / fast
        how = f"torch's copy at {speed[0]:.2f} TB/s, the lab's kernel at {speed[1]:.2f}"
        title, word = machine.card("h200").title, "recorded"
        rows.append(dict(zip(rows[0], (title, slow, fast, slow / fast, how, word), strict=True)))
    return pd.DataFrame(rows)


def taken_away() -> pd.DataFrame:
    """Which share of the cast went, in the report and in sglang #35291."""
    of, issue = server(), published("sglang-35291")
    before, cast = issue["step_ms"], issue["cast_ms"]
    pool = issue["bf16_pool"]
    rows = [
        ("the GLM-5 report: a shadow", of.before_ms, of.after_ms, of.cast_ms),
        (f"sglang #35291: BF16 pool of {pool['pool_tokens']:,}", before, pool["step_ms"], cast),
        ("sglang #35291: flashmla", before, issue["flashmla"]["step_ms"], cast),
    ]
    table = pd.DataFrame(rows, columns=["what", "before_ms", "after_ms", "cast_ms"])
    gone = (table.before_ms - table.after_ms) / table.cast_ms
    return table.assign(share_of_the_cast=gone, provenance=str(DERIVED))


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
        ("cast per step (ms)", cast, issue["cast_ms"], source),
        ("cast per layer (us)", 1000 * cast / model.layers, issue["cast_us_per_layer"], source),
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

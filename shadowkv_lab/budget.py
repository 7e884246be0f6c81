"""Where a GPU's memory goes, term by term, and how many tokens each strategy can then keep."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.errors import DoesNotFit, OutOfRange
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.strategies import Strategy, parse, parse_list, runnable

GIB = 1 << 30
ENGINES = ("sglang", "vllm")
REQUEST_ROWS = 48  # rows of the page table when the engine is not told how many requests may run


@dataclass(frozen=True)
class Term:
    """One line of the budget: signed GiB, how it comes about in numbers, and its provenance."""

    name: str
    gib: float
    formula: str
    provenance: str


@dataclass(frozen=True)
class Capacity:
    """What one strategy makes of the KV memory. Bytes a token are over all layers of one GPU."""

    strategy: str
    token_bytes: int
    index_bytes: int  # of token_bytes, the DSA index keys
    tokens: int
    requests: int  # of `Budget.context` tokens each
    kept_gib: float
    scratch_gib: float  # BF16 rows that one layer at a time is cast into
    left_gib: float  # of the reserve, behind graphs, page tables, activations and this scratch

    @property
    def fits(self) -> bool:
        """Whether the wanted requests and the scratch fit the card."""
        return self.tokens > 0 and self.left_gib >= 0


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU. `terms` add up to `kv_gib`; `spent` is taken from the reserve."""

    model: Model
    card: Card
    tensor_parallel: int
    engine: str
    context: int
    concurrency: int
    terms: tuple[Term, ...]
    spent: tuple[Term, ...]
    kv_gib: float
    reserve_gib: float
    capacities: tuple[Capacity, ...]

    @property
    def formula(self) -> str:
        """The KV memory, term by term with its numbers; one line a term."""
        lines = [
            f"{t.gib or 0:+9.2f} GiB  {t.name}: {t.formula} [{t.provenance}]" for t in self.terms
        ]
        return "\n".join([*lines, f"= {self.kv_gib:7.2f} GiB  KV cache"])

    def of(self, strategy: "str | Strategy") -> Capacity:
        """The capacity of one strategy."""
        label = parse(strategy).label
        return next(c for c in self.capacities if c.strategy == label)

    def table(self) -> pd.DataFrame:
        """One row a strategy."""
        return pd.DataFrame([{**vars(c), "fits": c.fits} for c in self.capacities])


def budget(
    model: "Model | str",
    card: "Card | str",
    tensor_parallel: int = 8,
    weights_gib: float | None = None,
    mem_fraction_static: float | None = None,
    strategies: "Sequence[Strategy | str] | str | None" = None,
    *,
    context: int = 1024,
    concurrency: int = 1,
    kv_gib: float | None = None,
    pool_tokens: int | None = None,
    pool_dtype: str = "fp8",
    before_weights_gib: float = 0.0,
    graphs_gib: float = 0.0,
    activations_gib: float = 0.0,
    index: bool = True,
    mtp: bool = False,
    page_size: int = 1,
    engine: str = "sglang",
    recorded: Collection[str] = (),
) -> Budget:
    """The budget of one GPU, by the engine's own rule.

    `weights_gib` is per GPU, as logs print it, and `mem_fraction_static` SGLang's (or vLLM's
    `gpu_memory_utilization`); both default to the case's. SGLang: KV = free after weights - (1 -
    fraction) x free before weights. vLLM: KV = fraction x card - before - weights - graphs -
    activations. `kv_gib`, or `pool_tokens` rows of `pool_dtype`, from a log overrules the rule,
    and what the rule then cannot account for is a term of its own. `recorded` names the arguments
    that a log or a publication gave; others are assumed. Raises `OutOfRange`, or `DoesNotFit`
    where nothing is left for KV.
    """
    model, card = load_model(model), machine.card(card) if isinstance(card, str) else card
    case = facts.find("published", "published result", "case")
    if weights_gib is None:
        weights_gib = case["weights_gib"]
        recorded = [*recorded, *(["weights_gib"] if model.name == case["model"] else [])]
    fraction = case["mem_fraction_static"] if mem_fraction_static is None else mem_fraction_static
    heads = model.heads_per_gpu(tensor_parallel)

    def source(name: str) -> str:
        return "recorded" if name in recorded else "assumed"

    _check(
        weights_gib=weights_gib,
        before_weights_gib=before_weights_gib,
        graphs_gib=graphs_gib,
        activations_gib=activations_gib,
        kv_gib=kv_gib,
        pool_tokens=pool_tokens,
    )
    _check(least=1, context=context, concurrency=concurrency, page_size=page_size)
    if not 0 < fraction < 1:
        raise OutOfRange(f"A memory fraction of {fraction}", "above 0 and below 1")
    if engine not in ENGINES:
        raise OutOfRange(f"Engine {engine!r}", ", ".join(ENGINES))
    if context > model.max_positions:
        raise OutOfRange(f"Context {context} for {model.name}", f"1 to {model.max_positions}")

    before = card.memory_gib - before_weights_gib
    pages_gib = 4 * max(concurrency, REQUEST_ROWS) * model.max_positions / GIB
    spent = (
        Term("CUDA graphs", graphs_gib, "as typed", source("graphs_gib")),
        Term(
            "page tables",
            pages_gib,
            f"4 B x {max(concurrency, REQUEST_ROWS)} requests x {model.max_positions} positions",
            "calibrated",
        ),
        Term("activations", activations_gib, "as typed", source("activations_gib")),
    )
    terms = [
        Term("card memory", card.memory_gib, f"{card.memory_mib} MiB / 1024", "recorded"),
        Term(
            "before weights",
            0 - before_weights_gib,
            "CUDA context, NCCL, others",
            source("before_weights_gib"),
        ),
        Term("weights", -weights_gib, "'mem usage' of one GPU", source("weights_gib")),
    ]
    if engine == "sglang":
        reserve, rule = (1 - fraction) * before, f"(1 - {fraction}) x {before:.2f} free before"
    else:
        reserve = (1 - fraction) * card.memory_gib
        rule = f"(1 - {fraction}) x {card.memory_gib:.2f} of the card"
        terms += [Term(t.name, -t.gib, t.formula, t.provenance) for t in spent]
    terms.append(Term("reserve", -reserve, rule, "calibrated"))
    if pool_tokens is not None:
        a_token = model.token_bytes(pool_dtype, index=index, mtp=mtp)
        kv_gib = pool_tokens * a_token / GIB
    rest = sum(t.gib for t in terms)
    if kv_gib is not None:
        terms.append(
            Term(
                "not accounted for",
                kv_gib - rest,
                f"the log's {kv_gib:.2f} GiB of KV - {rest:.2f} by the rule",
                source("kv_gib"),
            )
        )
    kv = sum(t.gib for t in terms)
    if kv <= 0 or before - weights_gib < kv:
        raise DoesNotFit(
            f"{model.name} on {card.title}: {weights_gib:.2f} GiB of weights and a reserve of "
            f"{reserve:.2f} GiB leave {rest:.2f} of {card.memory_gib:.2f} GiB for KV"
            + (f", and {kv_gib:.2f} were asked for" if kv_gib else ""),
            (
                f"up to {before - weights_gib:.2f} GiB of KV"
                if kv_gib and before > weights_gib
                else f"weights below {before - reserve:.2f} GiB a GPU"
            ),
            "Use more GPUs, a smaller checkpoint, a larger card, or a larger memory fraction",
        )
    if strategies:
        chosen = parse_list(strategies)
    else:
        chosen = runnable(model, heads, card.compute_capability)
    # vLLM has taken graphs, page tables and activations off the KV cache already.
    left = reserve - (sum(t.gib for t in spent) if engine == "sglang" else 0)
    load_ = context, concurrency
    capacities = tuple(_capacity(s, model, kv, left, *load_, index, mtp, page_size) for s in chosen)
    return Budget(
        model, card, tensor_parallel, engine, *load_, tuple(terms), spent, kv, reserve, capacities
    )


def _check(least: float = 0, **sizes: float | None) -> None:
    for name, size in sizes.items():
        if size is not None and not (math.isfinite(size) and size >= least):
            raise OutOfRange(f"{name} of {size}", f"a finite number, {least} or more")
    for name in ("weights_gib", "kv_gib", "pool_tokens"):
        if sizes.get(name) == 0:
            raise OutOfRange(f"{name} of 0", "above 0")


def token_bytes(strategy: Strategy, model: Model, index: bool, mtp: bool) -> int:
    """Bytes a strategy keeps per token on one GPU: rows of all layers, index keys, MTP layer."""
    index_layers = model.index_layers + (model.mtp_layers if mtp and model.dsa else 0)
    mtp_row = model.row_bytes("+".join(strategy.at(model.layers - 1).kinds))
    return (
        strategy.token_bytes(model)
        + (model.mtp_layers * mtp_row if mtp else 0)
        + (index_layers * model.row_bytes("index") if index and model.dsa else 0)
    )


def _capacity(strategy, model, kv_gib, left_gib, context, concurrency, index, mtp, page_size):
    a_token = token_bytes(strategy, model, index, mtp)
    tokens = int(kv_gib * GIB // a_token) // page_size * page_size
    a_request = -(-context // page_size) * page_size
    live = min(concurrency, tokens // a_request) * context
    scratch = strategy.scratch_bytes(model, tokens, live) / GIB
    return Capacity(
        strategy.label,
        a_token,
        a_token - token_bytes(strategy, model, False, mtp),
        tokens,
        tokens // a_request,
        tokens * a_token / GIB,
        scratch,
        left_gib - scratch,
    )


def largest_context(
    plan: Budget, strategy: "str | Strategy", concurrency: int | None = None
) -> int:
    """The longest context that so many requests can each have; 0 where not one token fits."""
    _check(least=1, concurrency=concurrency)
    tokens = plan.of(strategy).tokens // (concurrency or plan.concurrency)
    return min(tokens, plan.model.max_positions)


def cards_for(
    model: "Model | str", strategy: "str | Strategy", concurrency: int, context: int, **options
) -> pd.DataFrame:
    """Every known card, smallest first: tokens, requests, and whether the wanted load fits.

    `options` are those of `budget`. The first row with `fits` is the smallest card.
    """
    rows = []
    for card in sorted(map(machine.card, machine.known_cards()), key=lambda c: c.memory_mib):
        try:
            plan = budget(
                model,
                card,
                strategies=[strategy],
                context=context,
                concurrency=concurrency,
                **options,
            )
            capacity, why = plan.capacities[0], ""
        except DoesNotFit as error:
            capacity, why = None, error.what
        fits = capacity is not None and capacity.fits and capacity.requests >= concurrency
        if capacity and not fits:
            why = f"holds {capacity.requests} requests of {context} tokens, wanted {concurrency}"
        rows.append(
            {
                "card": card.name,
                "memory_gib": card.memory_gib,
                "tokens": capacity.tokens if capacity else 0,
                "requests": capacity.requests if capacity else 0,
                "fits": fits,
                "why": why,
            }
        )
    return pd.DataFrame(rows)

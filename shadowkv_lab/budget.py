"""Where a GPU's memory goes, term by term, and how many tokens each strategy can then keep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from shadowkv_lab import machine
from shadowkv_lab.deployment import GIB, Deployment, Memory, Term
from shadowkv_lab.errors import CannotRun, DoesNotFit, OutOfRange
from shadowkv_lab.load import Load
from shadowkv_lab.provenance import Provenance, calibrated
from shadowkv_lab.rules import Verdict, can_run
from shadowkv_lab.strategies import STRATEGIES, Label, Strategy, parse, parse_list

AS_LAID_OUT = ("as laid out", "#7F7F7F", -1)


@dataclass(frozen=True)
class Capacity:
    """What one strategy makes of the KV memory. Bytes per token are over all layers of one GPU.

    `rows` are slots of one GPU's pool, `tokens` what the GPUs that share a request's attention
    keep together (DCP), `requests` what all DP ranks do.
    """

    strategy: Label
    token_bytes: int
    index_bytes: int  # of token_bytes, the DSA index keys
    rows: int
    tokens: int
    requests: int  # of the load's context each
    kept_gib: float  # the pool, and the strategy's own buffers beside it
    scratch_gib: float  # BF16 rows that one layer at a time is cast into
    left_gib: float | None  # of the reserve, after graphs, page tables, activations, this scratch
    untried: str
    provenance: Provenance

    @property
    def fits(self) -> bool:
        """Whether it keeps a token, and its scratch fits the reserve as far as that is known."""
        return self.tokens > 0 and (self.left_gib is None or self.left_gib >= 0)


@dataclass(frozen=True)
class Refused:
    """A strategy that the rules refuse here: no capacity, and the verdict that says why."""

    strategy: Label
    verdict: Verdict


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU of a deployment, and what each strategy keeps of a load.

    `pool` is the deployment's own pool, as its rows are laid out, `capacities` are those of the
    strategies that can run there; the others are in `refused`.
    """

    deployment: Deployment
    load: Load
    memory: Memory
    pool: Capacity
    capacities: tuple[Capacity, ...]
    refused: tuple[Refused, ...]

    @property
    def kv_gib(self) -> float:
        return self.memory.kv_gib

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.memory.terms

    @property
    def formula(self) -> str:
        """The KV memory, term by term with its numbers; one line per term."""
        at, made = self.deployment, self.memory
        lines = [f"{t.gib:+9.2f} GiB  {t.name}: {t.formula} [{t.provenance}]" for t in made.terms]
        if made.reserve_gib is None:
            estimated = at.checkpoint.weights_gib
            why = f"{estimated:.2f} GiB would not fit; " if estimated else ""
            lines.append(f"     not known  weights: {why}{at.checkpoint.provenance.how}")
        lines.append(f"= {made.kv_gib:7.2f} GiB  KV cache [{made.provenance}]")
        rows = f"{self.pool.rows:,} slots of {self.pool.token_bytes:,} B ({at.layout}"
        rows += f", {self.pool.index_bytes:,} B of index keys)" if self.pool.index_bytes else ")"
        return "\n".join([*lines, f"  {rows}{_shared(at, self.pool)}"])

    def of(self, strategy: "str | Strategy") -> Capacity:
        """The capacity of one strategy; raises `CannotRun` with the reason where it has none."""
        label = parse(strategy).label
        for refused in self.refused:
            if refused.strategy.label == label:
                raise CannotRun(
                    f"{refused.strategy.title} in {self.deployment}: {refused.verdict.reason}",
                    remedy="Leave it out, or choose another card, layout or strategy",
                )
        return next(c for c in self.capacities if c.strategy.label == label)

    def table(self) -> pd.DataFrame:
        """One row per strategy; refused ones have a reason and no numbers."""
        rows = [
            {**vars(c), "strategy": c.strategy.label, "provenance": str(c.provenance)}
            | {"fits": c.fits, "reason": c.untried}
            for c in self.capacities
        ]
        rows += [
            {"strategy": r.strategy.label, "fits": False, "reason": r.verdict.reason}
            for r in self.refused
        ]
        columns = [f for f in Capacity.__dataclass_fields__ if f != "untried"]
        columns = [*columns, "fits", "reason"]
        return pd.DataFrame(rows, columns=columns, dtype=object).astype({"fits": bool})


def budget(
    deployment: Deployment,
    load: Load | None = None,
    strategies: "Sequence[Strategy | str] | str | None" = None,
) -> Budget:
    """The budget of one GPU of a deployment, for a load of the whole server.

    `strategies` default to all. Raises `OutOfRange` for a context beyond the model's positions,
    `NoAnswer` where neither the weights nor the KV memory are known, and `DoesNotFit` where
    nothing is left for KV.
    """
    load, model = load or Load(), deployment.model
    if not 1 <= load.context <= model.max_positions:
        raise OutOfRange(f"Context {load.context} for {model.name}", f"1 to {model.max_positions}")
    if load.concurrency < 1:
        raise OutOfRange(f"{load.concurrency} requests", "1 or more")
    memory = deployment.memory()
    chosen = parse_list(strategies) if strategies else [kind() for kind in STRATEGIES.values()]
    verdicts = [(s, can_run(s, deployment)) for s in chosen]
    name, colour, order = AS_LAID_OUT
    own = Label(deployment.layout, f"{deployment.layout}, {name}", colour, order)
    return Budget(
        deployment,
        load,
        memory,
        _capacity(None, own, "", deployment, load, memory),
        tuple(
            _capacity(s, s.tag, verdict.untried, deployment, load, memory)
            for s, verdict in verdicts
            if verdict
        ),
        tuple(Refused(s.tag, verdict) for s, verdict in verdicts if not verdict),
    )


def _capacity(
    strategy: Strategy | None, tag: Label, untried: str, at: Deployment, load: Load, memory: Memory
) -> Capacity:
    a_token, fixed = at.token_bytes(strategy), at.fixed_bytes(strategy) / GIB
    rows = at.rows(strategy, memory)
    tokens = rows * at.decode_context_parallel
    pages = -(-int(load.context) // at.page_size) * at.page_size
    share = at.share(load)
    live = min(share.concurrency, tokens // pages) * share.context
    scratch = 0.0
    if strategy:
        # Whole requests, or a part of one where not even one fits; at most what they choose.
        read = at.model.read_tokens(replace(share, concurrency=1)) / share.context
        scratch = strategy.scratch_bytes(at.model, rows, int(live * read)) / GIB
    left = memory.left_gib
    return Capacity(
        tag,
        a_token,
        at.index_bytes(strategy),
        rows,
        tokens,
        tokens // pages * at.data_parallel,
        rows * a_token / GIB + fixed,
        scratch,
        None if left is None else left - scratch,
        untried,
        memory.provenance + calibrated(f"KV memory / {a_token:,} B"),
    )


def _shared(at: Deployment, pool: Capacity) -> str:
    """What the GPUs together keep, in words, where it is more than one pool."""
    said = ""
    if at.decode_context_parallel > 1:
        said += f"; DCP {at.decode_context_parallel}: {pool.tokens:,} tokens"
    if at.pipeline_parallel > 1:
        layers = " or ".join(str(n) for n in sorted({len(stage) for stage in at.stages}))
        said += f"; PP {at.pipeline_parallel}: {layers} layers per stage, the larger counts"
    if at.data_parallel > 1:
        said += f"; DP {at.data_parallel}: each rank has its own pool, together "
        said += f"{pool.tokens * at.data_parallel:,} tokens"
    return said


def largest_context(
    plan: Budget, strategy: "str | Strategy", concurrency: int | None = None
) -> int:
    """The longest context for this many concurrent requests; 0 if nothing fits."""
    concurrency = plan.load.concurrency if concurrency is None else concurrency
    if concurrency < 1:
        raise OutOfRange(f"{concurrency} requests", "1 or more")
    at = plan.deployment
    tokens = plan.of(strategy).tokens // -(-concurrency // at.data_parallel)
    return min(tokens // at.page_size * at.page_size, at.model.max_positions)


def cards_for(deployment: Deployment, strategy: "str | Strategy", load: Load) -> pd.DataFrame:
    """Every known card, smallest first: tokens, requests, and whether the load fits there.

    The same checkpoint, spread and engine on each card; a KV size, pool or memory that a log gave
    of one card is left out, and a typed fraction is kept. The first row with `fits` is the smallest
    card.
    """
    rows = []
    for card in sorted(map(machine.card, machine.known_cards()), key=lambda c: c.memory_mib):
        capacity, why = None, ""
        try:
            plan = budget(deployment.on(card), load, [strategy])
            capacity = plan.of(strategy)
        except (DoesNotFit, CannotRun) as error:
            why = error.what
        fits = capacity is not None and capacity.fits and capacity.requests >= load.concurrency
        if capacity and not fits:
            why = f"holds {capacity.requests} requests of {load.context:,.0f} tokens"
            why += f", wanted {load.concurrency}"
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

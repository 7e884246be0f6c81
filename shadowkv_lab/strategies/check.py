"""Is a strategy right? Float64, a byte meter, and what a restored request reads."""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shadowkv_lab.deployment import Setting
from shadowkv_lab.errors import WrongResult
from shadowkv_lab.kernels import reference
from shadowkv_lab.kernels.reference import bits
from shadowkv_lab.load import Load
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import synthetic
from shadowkv_lab.strategies.base import Strategy
from shadowkv_lab.strategies.step import DecodeStep

ROUNDED = 3e-2  # with queries in FP8: Hopper sums FP8 products with about 14 bits
LAYERS, HEADS, POOL_TOKENS = 2, 8, 512
DSA_LAYERS, DSA_TOPK = 3, 32  # the second layer reads what the first has chosen
PICKS = {"aten::index_select", "aten::index", "aten::gather", "aten::embedding"}
PUTS = {"aten::index_copy_", "aten::index_put_", "aten::scatter_", "aten::_index_put_impl_"}


class ByteMeter(TorchDispatchMode):
    """Counts the bytes of watched buffers that torch ops read and write, while it is entered.

    An op that picks rows reads as many bytes as it returns, one that puts rows writes as many as
    it is given; any other reads each watched argument whole, and writes it whole where its schema
    says that it changes it. Views move nothing. Kernels that torch does not dispatch (Triton) are
    not seen, so it is used with the reference path.
    """

    def __init__(self, buffers: list[torch.Tensor]):
        super().__init__()
        self.watched = {b.untyped_storage().data_ptr() for b in buffers}
        self.bytes = 0

    def _watches(self, value: object) -> bool:
        return (
            isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.watched
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        # An output that lies in an argument's memory, which the op does not change, is a view.
        if any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
            return out
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if not self._watches(value):
                continue
            written = argument.alias_info is not None and argument.alias_info.is_write
            if schema.name in PUTS and written:
                source = [a for a in args[1:] if isinstance(a, torch.Tensor)][-1]
                self.bytes += source.nbytes
            elif schema.name in PICKS and not written:
                self.bytes += out.nbytes
            else:
                self.bytes += value.nbytes
        return out


def count_bytes(step: DecodeStep) -> dict[str, int]:
    """Bytes of the pool, the strategy's buffers, its scratch and the index, by phase of a step.

    `step` must read by the reference path (`backend="reference"`), on a CPU.
    """
    kept = [b for b in (*step.pool.fp8, *step.pool.bf16) if b is not None]
    own = [b for buffers in step.buffers for b in buffers.values()]
    found: Counter[str] = Counter()
    rows, choice = [*kept, *own, *step.scratch.values()], []
    if of := step.chooser:
        choice = [*step.pool.index.values(), of.scores, of.chosen.pages]
    for layer in range(step.pool.layers):
        for phase in step.phases:
            # To attention the chosen slots are a page table, and those are not counted.
            with ByteMeter(choice if phase in ("index", "top_k") else rows) as meter:
                getattr(step, phase)(layer)
            found[phase] += meter.bytes
    names = {"cast": "cast", "attention": "attend", "write": "write"}
    names |= {"index": "index", "top_k": "top_k"} if step.chooser else {}
    return {name: found[phase] for name, phase in names.items()}


def output_error(step: DecodeStep, layer: int) -> float:
    """Worst relative L2 error of a (request, head) against float64 over the layer's stored rows.

    Of those, the rows that it reads. Raises `WrongResult` if the layer's stored rows lack the
    step's new ones.
    """
    pool, batch = step.pool, step.batch
    fp8, bf16 = pool.fp8[layer], pool.bf16[layer]
    written = fp8 if fp8 is not None else bf16
    rows = step.rows[layer]
    wanted = rows if fp8 is None else reference.to_fp8(rows)
    if not torch.equal(bits(written)[batch.new_slots], bits(wanted)):
        raise WrongResult(f"{step.strategy.label}: layer {layer} lacks its new rows")

    def off(*queries: torch.Tensor) -> float:
        stored, scale = fp8 if bf16 is None else bf16, pool.model.softmax_scale
        options = step.reading, scale, torch.float64, batch.queries
        exact = reference.attend(*queries, stored, *options)
        return reference.relative_error(step.out[layer], exact)

    queries = step.q_nope[layer], step.q_pe[layer]
    rounds = step.at[layer].query == "fp8" and step.backend != "reference"
    # Rounding may tip a softmax over: only for the rounded queries must the outputs be near.
    if rounds and (error := off(*reference.in_fp8(*queries))) > ROUNDED:
        raise WrongResult(
            f"{step.strategy.label} is off by {error:.2e} from float64 with rounded queries",
            f"a relative L2 error up to {ROUNDED:.0e}",
        )
    return off(*queries)


def require_right(step: DecodeStep, error: float) -> None:
    """Raise `WrongResult` for an error beyond the tolerance."""
    if not error <= (allowed := step.strategy.tolerance):
        raise WrongResult(
            f"{step.strategy.label} with {step.backend} is off by {error:.2e} from float64",
            f"a relative L2 error up to {allowed:.0e}",
            "No time is reported for a wrong result",
        )


class Found(NamedTuple):
    """One check and what it found; a failed one raises instead."""

    check: str
    found: str


@dataclass(frozen=True)
class Checked:
    """What `check` found of a strategy that passed."""

    strategy: str
    found: tuple[Found, ...]

    def __str__(self) -> str:
        return "\n".join([self.strategy, *(f"  {f.check}: {f.found}" for f in self.found)])


def check(strategy: Strategy, model: "Model | str" = "glm-5", reads: str = "dense") -> Checked:
    """Check a strategy on this machine's CPU, at small sizes; raises `WrongResult`.

    Its output against float64, fresh and after the batch moved to other pages, at page sizes 1 and
    64; its bytes, phase by phase, against its own `moves`; and its output after its requests were
    saved and restored to other slots. With `reads="dsa"` each layer is compared as soon as it has
    run, over the rows that it has chosen, and the choice itself with that of float64 scores.
    """
    model = load_model(model)
    small = replace(model, layers=min(LAYERS, model.layers), index_layers=0)
    if reads == "dsa":
        model.read_tokens(Load(reads=reads))  # raises where the model has no index
        sizes = dict(layers=DSA_LAYERS, index_layers=2, index_at=(0, 2), index_topk=DSA_TOPK)
        small = replace(model, **sizes)
    worst = {}
    for page_size in (1, 64):
        step = make_step(strategy, small, page_size, reads)
        errors = []
        for turn in range(3):
            errors.append(worst_error(step))
            require_right(step, max(errors))
            step.advance(turn)
        worst[page_size] = max(errors)
    step = make_step(strategy, small, 1, reads)
    counted = count_bytes(step)
    slots = step.pool.pool_tokens + step.pool.page_size
    load = Load(step.batch.concurrency, step.batch.lens[0], reads=reads)
    said = strategy.moves_at(Setting(small, HEADS, slots, load))
    for phase, ours in said.items():
        if ours != counted[phase]:
            raise WrongResult(
                f"{strategy.label}: its {phase} moves {counted[phase]:,} bytes, and "
                f"`moves` says {ours:,}",
                remedy="Correct `moves`, or what the phase does",
            )
    restored = _restored(strategy, small, reads)
    texts = ", ".join(f"{error:.1e} at page size {size}" for size, error in worst.items())
    return Checked(
        strategy.label,
        (
            Found("worst relative error against float64", texts),
            Found(
                f"bytes as `moves` says ({', '.join(counted).replace('top_k', 'top-k')})",
                f"{tuple(counted.values())}",
            ),
            Found("after saving and restoring its requests", f"{restored:.1e}"),
        ),
    )


def worst_error(
    step: DecodeStep, phases: tuple[str, ...] | None = None, layers: Container[int] | None = None
) -> float:
    """The worst `output_error` of a step; runs `phases` of it, by default all, layer by layer.

    A layer's choice is overwritten by the next one's, so both are checked as soon as it has run;
    of `layers` alone if given.
    """
    errors = []
    for layer in range(step.pool.layers):
        step.run_layer(layer, *(step.phases if phases is None else phases))
        if layers is None or layer in layers:
            if step.chooser and layer in step.pool.index:
                step.chooser.require_right(layer)
            errors.append(output_error(step, layer))
    return max(errors)


def make_step(
    strategy: Strategy, model: Model, page_size: int = 1, reads: str = "dense"
) -> DecodeStep:
    """Three requests on a small CPU pool, read by the reference path."""
    pool = Pool(
        model,
        POOL_TOKENS if page_size == 1 else 16 * page_size,
        strategy.storage(model),
        order="random",
        page_size=page_size,
        mirror=getattr(strategy, "mirror", "exact"),
        index=reads == "dsa",
    )
    synthetic.fill(pool, seed=3)
    synthetic.fill_index(pool, seed=3)
    batch = pool.batch(3, 40 if page_size == 1 else 70)
    return DecodeStep(strategy, pool, batch, HEADS, backend="reference", reads=reads)


def _restored(strategy: Strategy, model: Model, reads: str) -> float:
    """The error of a step whose requests were moved out of the pool and back to other slots."""
    first = make_step(strategy, model, 1, reads)
    pool, slots = first.pool, first.batch.live_slots.clone()
    saved = pool.save(slots)
    pool.release(first.batch)
    held = pool.allocate(7)  # so that the requests come to lie elsewhere
    batch = pool.batch(3, 40)
    pool.load(batch.live_slots, saved)
    step = DecodeStep(strategy, pool, batch, HEADS, backend="reference", reads=reads)
    error = worst_error(step)
    require_right(step, error)
    pool.free(held)
    return error

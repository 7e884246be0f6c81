"""One decode step of a strategy: all layers, each writes its new rows, then attends."""

from collections.abc import Callable

import torch

from shadowkv_lab import kernels
from shadowkv_lab.load import Batch
from shadowkv_lab.pool import Pool
from shadowkv_lab.strategies.base import Strategy
from shadowkv_lab.strategies.index import Index

PHASES = ("write", "cast", "attend")
DSA_PHASES = ("write", "index", "top_k", "cast", "attend")


class DecodeStep:
    """A strategy at work on one pool and batch: static buffers, no host sync in `step`.

    Queries, new rows and outputs are each layer's own: `q_nope` [layers, B, H, rank], `q_pe`
    [layers, B, H, rope], `rows` [layers, B, row], `out` [layers, B, H, rank], all BF16. Of a batch
    with several query tokens per request, H is queries x heads and there are as many new rows.
    `buffers[layer][name]` [n, row] are what the layer's strategy keeps between steps beside the
    pool, `scratch[strategy]` [n, row] what the layers of one strategy share. `reading` is the batch
    of the rows that attention reads: the requests' own, or with `reads="dsa"` those that `index`
    has chosen.
    """

    def __init__(
        self,
        strategy: Strategy,
        pool: Pool,
        batch: Batch,
        heads: int,
        *,
        backend: str = "auto",
        seed: int = 0,
        reads: str = "dense",
    ):
        model, device = pool.model, pool.device
        self.strategy, self.pool, self.batch = strategy, pool, batch
        self.at = [strategy.at(layer) for layer in range(pool.layers)]
        slots = pool.pool_tokens + pool.page_size
        self.chooser = Index(pool, batch, seed) if reads == "dsa" else None
        self.reading = self.chooser.chosen if self.chooser else batch
        self.phases = DSA_PHASES if self.chooser else PHASES
        generator = torch.Generator(device).manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            values = torch.empty(*shape, dtype=torch.bfloat16, device=device)
            return values.normal_(generator=generator)

        B, rank, rope = batch.concurrency, model.kv_lora_rank, model.qk_rope_head_dim
        self.q_nope = noise(pool.layers, B, batch.queries * heads, rank)
        self.q_pe = noise(pool.layers, B, batch.queries * heads, rope)
        self.rows = noise(pool.layers, len(batch.new_slots), model.row)
        self.out = torch.full_like(self.q_nope, float("nan"))
        # Whatever a strategy keeps outlives the batch, as the pool does.
        self.buffers: list[dict[str, torch.Tensor]] = []
        for layer, s in enumerate(self.at):
            kept = pool.beside.setdefault((s.label, layer), {})
            for name, rows in s.buffers(model).items():
                if name not in kept:
                    kept[name] = noise(rows, model.row)
            self.buffers.append(kept)
        self.scratch: dict[Strategy, torch.Tensor] = {}
        self.attention: dict[Strategy, kernels.Attention] = {}
        self.paged: dict[Strategy, Batch] = {}  # what each one's attention is planned for
        self.shared: dict[Strategy, torch.Tensor] = {}  # slots that it casts, each once
        for s in dict.fromkeys(self.at):
            if count := s.scratch_rows(slots, self.reading.live_tokens):
                self.scratch[s] = noise(count, model.row)
            self.attention[s] = kernels.attention(s.reads, device, backend, s.query)
            self.paged[s] = s.paged(self)
        self.plan(heads)
        for s in self.attention:
            s.prepare(self)

    def plan(self, heads: int) -> None:
        """Plan every attention kernel for the batch (host work, once per batch)."""
        model, q = self.pool.model, self.batch.queries
        more = {"queries": q} if q > 1 else {}
        for s, attention in self.attention.items():
            attention.plan(
                self.paged[s],
                heads,
                model.softmax_scale,
                rank=model.kv_lora_rank,
                rope=model.qk_rope_head_dim,
                **more,
            )

    @property
    def backend(self) -> str:
        """Names of the attention kernels in use."""
        return "+".join(sorted({a.name for a in self.attention.values()}))

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay between steps: the pool, its index keys, the strategy's own buffers."""
        own = (buffer.nbytes for buffers in self.buffers for buffer in buffers.values())
        return self.pool.kept_bytes + sum(own)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that a step needs besides and fills anew."""
        return sum(buffer.nbytes for buffer in self.scratch.values())

    def advance(self, turn: int) -> None:
        """Between two steps: fresh last pages for the batch, and whatever follows them."""
        self.batch.advance(turn)
        for s in self.attention:
            s.advance(self, turn)

    def write(self, layer: int) -> None:
        """Write the layer's new rows to every buffer it keeps."""
        self.at[layer].write(self, layer)

    def index(self, layer: int) -> None:
        """Write the new tokens' index keys and score the live ones, if the layer chooses."""
        if layer in self.pool.index:
            self.chooser.score(layer)

    def top_k(self, layer: int) -> None:
        """Choose the rows that this layer reads, and those after it that do not choose."""
        if layer in self.pool.index:
            self.chooser.choose()

    def cast(self, layer: int) -> None:
        """Make the layer's rows readable, if attention cannot read what is kept."""
        self.at[layer].cast(self, layer)

    def attend(self, layer: int) -> None:
        """Attend over the layer's readable rows into `out[layer]`."""
        s = self.at[layer]
        rows = s.readable(self, layer)
        self.attention[s].run(self.q_nope[layer], self.q_pe[layer], rows, self.out[layer])

    def run(self, *phases: str, mark: Callable[[str], object] | None = None) -> None:
        """Run some of `phases` layer by layer; all of them are the step.

        `mark(phase)` is called after each phase of each layer.
        """
        for layer in range(self.pool.layers):
            self.run_layer(layer, *phases, mark=mark)

    def run_layer(
        self, layer: int, *phases: str, mark: Callable[[str], object] | None = None
    ) -> None:
        """Run phases of one layer, as `run` does of all."""
        for phase in phases:
            getattr(self, phase)(layer)
            if mark:
                mark(phase)

    def step(self) -> None:
        """The whole decode step."""
        self.run(*self.phases)

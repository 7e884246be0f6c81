"""One decode step of a strategy: all layers, each writes its new rows, then attends."""

from collections.abc import Callable

import torch

from shadowkv_lab import kernels
from shadowkv_lab.load import Batch
from shadowkv_lab.pool import Pool
from shadowkv_lab.strategies.base import Strategy

PHASES = ("write", "cast", "attend")


class DecodeStep:
    """A strategy at work on one pool and batch: static buffers, no host sync in `step`.

    Queries, new rows and outputs are each layer's own: `q_nope` [layers, B, H, rank], `q_pe`
    [layers, B, H, rope], `rows` [layers, B, row], `out` [layers, B, H, rank], all BF16.
    `buffers[layer][name]` [n, row] are what the layer's strategy keeps between steps beside the
    pool, `scratch[strategy]` [n, row] what the layers of one strategy share.
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
    ):
        model, device = pool.model, pool.device
        self.strategy, self.pool, self.batch = strategy, pool, batch
        self.at = [strategy.at(layer) for layer in range(pool.layers)]
        generator = torch.Generator(device).manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            values = torch.empty(*shape, dtype=torch.bfloat16, device=device)
            return values.normal_(generator=generator)

        B, rank, rope = batch.concurrency, model.kv_lora_rank, model.qk_rope_head_dim
        self.q_nope = noise(pool.layers, B, heads, rank)
        self.q_pe = noise(pool.layers, B, heads, rope)
        self.rows = noise(pool.layers, B, model.row)
        self.out = torch.full_like(self.q_nope, float("nan"))
        self.buffers = [
            {name: noise(rows, model.row) for name, rows in s.buffers(model).items()}
            for s in self.at
        ]
        self.scratch: dict[Strategy, torch.Tensor] = {}
        self.attention: dict[Strategy, kernels.Attention] = {}
        for s in dict.fromkeys(self.at):
            if count := s.scratch_rows(pool.pool_tokens + pool.page_size, batch.live_tokens):
                self.scratch[s] = noise(count, model.row)
            self.attention[s] = kernels.attention(s.reads, device, backend)
        self.plan(heads)
        for s in self.attention:
            s.prepare(self)

    def plan(self, heads: int) -> None:
        """Plan every attention kernel for the batch (host work, once per batch)."""
        model = self.pool.model
        for s, attention in self.attention.items():
            attention.plan(
                self.batch.compact() if s.compact else self.batch,
                heads,
                model.softmax_scale,
                rank=model.kv_lora_rank,
                rope=model.qk_rope_head_dim,
            )

    @property
    def backend(self) -> str:
        """Names of the attention kernels in use."""
        return "+".join(sorted({a.name for a in self.attention.values()}))

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay between steps: the pool, and the strategy's own buffers."""
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

    def cast(self, layer: int) -> None:
        """Make the layer's rows readable, if attention cannot read what is kept."""
        self.at[layer].cast(self, layer)

    def attend(self, layer: int) -> None:
        """Attend over the layer's readable rows into `out[layer]`."""
        s = self.at[layer]
        rows = s.readable(self, layer)
        self.attention[s].run(self.q_nope[layer], self.q_pe[layer], rows, self.out[layer])

    def run(self, *phases: str, mark: Callable[[str], object] | None = None) -> None:
        """Run phases ("write", "cast", "attend") layer by layer; all three are the step.

        `mark(phase)` is called after each phase of each layer.
        """
        for layer in range(self.pool.layers):
            for phase in phases:
                getattr(self, phase)(layer)
                if mark:
                    mark(phase)

    def step(self) -> None:
        """The whole decode step."""
        self.run(*PHASES)

"""What each strategy keeps beside SGLang's pool, and what the FlashInfer MLA backend reads of it.

A reader hangs on its pool. All buffers are made once; what runs inside a captured graph has fixed
shapes and no host sync. SGLang's own buffers and `get_key_buffer` stay as they are.
"""

import torch

from shadowkv_lab.errors import WrongResult
from shadowkv_lab.kernels import mover
from shadowkv_lab.kernels.reference import FP8
from shadowkv_lab.pool import CHECK_ROWS
from shadowkv_lab.server.plugin import Settings


class PoolView:
    """A pool as the backend sees it while it attends: other rows to read, all else the pool's."""

    def __init__(self, reader: "Reader", decoding: bool):
        self._reader, self._decoding = reader, decoding

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """[S, 1, 576] BF16, so that the backend's `.to(q.dtype)` has nothing to do."""
        return self._reader.read(layer_id, self._decoding)

    def __getattr__(self, name: str):
        return getattr(self._reader.pool, name)


class Reader:
    """A strategy on one pool; this one reads as SGLang does."""

    decodes = False  # whether it replaces the backend's decode attention as well

    def __init__(self, pool: object, chosen: Settings):
        self.pool, self.chosen = pool, chosen
        self.copies: dict[int, torch.Tensor] = {}  # by layer, BF16: what each write keeps up
        self.counters = torch.zeros(2, dtype=torch.int32, device=self.stored(self.layers[0]).device)
        self.views = {decoding: PoolView(self, decoding) for decoding in (False, True)}

    @property
    def layers(self) -> range:
        """The model's layers that this pool holds."""
        return range(self.pool.start_layer, self.pool.start_layer + self.pool.layer_num)

    def stored(self, layer: int) -> torch.Tensor:
        """A layer's rows [S, 576], e4m3."""
        return self.pool.kv_buffer[layer - self.pool.start_layer].flatten(1).view(FP8)

    def read(self, layer: int, decoding: bool) -> torch.Tensor:
        """The rows that attention of a layer reads, [S, 1, 576]."""
        return self.pool.get_key_buffer(layer)

    def write(
        self, layer: int, slots: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Write new rows, nope [R, 512] and rope [R, 64], and what is kept beside them.

        In one launch where SGLang takes three: it converts both parts before it stores them. Like
        SGLang's own kernel it leaves out slot 0, the padding's. Values beyond +-448 saturate, which
        `.to(float8_e4m3fn)` does from torch 2.13 on; before it they become NaN.
        """
        mover("append", slots.device)(
            nope,
            slots.reshape(-1).contiguous(),
            self.stored(layer),
            self.copies.get(layer),
            self.counters,
            tail=rope,
            first=1,
        )

    def wrote(self, layer: int, slots: torch.Tensor) -> None:
        """Told after a write of `slots` of one layer by SGLang itself."""

    def wrote_all(self, slots: torch.Tensor) -> None:
        """Told after a write of `slots` of every layer."""

    def plan(self, wrapper: object, backend: object, lens: "list[int] | None", total: int) -> None:
        """Told, outside graphs, that `wrapper` is planned for `total` live tokens."""

    def check(self) -> None:
        """Raise `WrongResult` if what is kept is not what the pool says (syncs)."""


class Shadow(Reader):
    """A BF16 mirror of the covered layers: each row cast once, after it was written.

    The row is read back from the pool, so it is `bf16(pool)` bit for bit however it came in, and
    where several writes of a step met in one slot (padding goes to slot 0) the one that stayed.
    """

    def __init__(self, pool: object, chosen: Settings):
        super().__init__(pool, chosen)
        for layer in filter(chosen.covers, self.layers):
            stored = self.stored(layer)
            copy = torch.empty(stored.shape, dtype=torch.bfloat16, device=stored.device)
            mover("cast", stored.device)(stored, copy)
            self.copies[layer] = copy

    def read(self, layer, decoding):
        if layer not in self.copies:
            return super().read(layer, decoding)
        return self.copies[layer].unsqueeze(1)

    def wrote(self, layer, slots):
        if layer in self.copies:
            refresh = mover("refresh", slots.device)
            refresh(self.stored(layer), slots.reshape(-1).contiguous(), self.copies[layer])

    def wrote_all(self, slots):
        for layer in self.copies:
            self.wrote(layer, slots)

    def check(self):
        for layer, copy in self.copies.items():
            stored = self.stored(layer)
            for start in range(0, len(stored), CHECK_ROWS):
                part = slice(start, start + CHECK_ROWS)
                wanted, found = stored[part].to(torch.bfloat16), copy[part]
                # As bits, so that -0 differs from 0; which NaN a NaN became does not matter.
                off = wanted.view(torch.int16) != found.view(torch.int16)
                off &= ~(wanted.isnan() & found.isnan())
                if off.any():
                    slot = start + int(off.any(1).nonzero()[0])
                    raise WrongResult(
                        f"Layer {layer}, slot {slot}: the mirror is not bf16(pool)",
                        remedy="Something wrote the pool past its class's write paths; report it "
                        "with the server's arguments, and serve without SHADOWKV_STRATEGY",
                    )


class VectorCast(Reader):
    """The whole pool cast for every layer and step, as SGLang does, by the lab's faster kernel."""

    def __init__(self, pool: object, chosen: Settings):
        super().__init__(pool, chosen)
        stored = self.stored(self.layers[0])
        self.scratch = torch.zeros(stored.shape, dtype=torch.bfloat16, device=stored.device)

    def read(self, layer, decoding):
        self.pool.get_key_buffer(layer)  # waits for the layer where a host cache is loading it
        mover("cast", self.scratch.device)(self.stored(layer), self.scratch)
        return self.scratch.unsqueeze(1)


class GatherCast(VectorCast):
    """Live rows only, gathered into the scratch's first rows; prefill still casts the whole pool.

    The backend's page size is 1, so its list of slots is replaced by 0, 1, 2, ... after each plan,
    outside graphs; the gather takes the slots themselves and their number from device buffers.
    Requests that share a prefix can have more live tokens than the pool has slots: then every row
    is cast in place and the list stays.
    """

    def __init__(self, pool: object, chosen: Settings):
        super().__init__(pool, chosen)
        options = dict(dtype=torch.int32, device=self.scratch.device)
        self.every = torch.arange(len(self.scratch), **options)
        self.slots, self.count = self.every.clone(), torch.zeros(1, **options)

    def plan(self, wrapper, backend, lens, total):
        if total >= len(self.every):
            self.slots.copy_(self.every)
            self.count.fill_(len(self.every))
            return
        listed = wrapper._kv_indices_buf[:total]
        self.slots[:total].copy_(listed)
        self.count.fill_(total)
        listed.copy_(self.every[:total])

    def read(self, layer, decoding):
        if not decoding:
            return super().read(layer, decoding)
        self.pool.get_key_buffer(layer)
        gather_cast = mover("gather_cast", self.scratch.device)
        gather_cast(self.stored(layer), self.slots, self.scratch, self.count)
        return self.scratch.unsqueeze(1)


class FusedFP8(VectorCast):
    """The lab's decode kernel over the FP8 rows themselves; prefill casts the whole pool."""

    decodes = True

    def __init__(self, pool: object, chosen: Settings):
        super().__init__(pool, chosen)
        self.partials = {}  # one layer's partial results, shared by all graphs

    def plan(self, wrapper, backend, lens, total):
        from shadowkv_lab.kernels.decode import FusedDecode, Listed

        if not lens:
            return
        planned, planner = getattr(wrapper, "_shadowkv", None), backend.indices_updater_decode
        if planned is None or len(planned.batch.lens) != len(lens):
            planned = wrapper._shadowkv = FusedDecode(self.partials)
        batch = Listed(tuple(lens), wrapper._kv_indices_buf)
        planned.plan(batch, planner.num_local_heads, planner.scaling, fixed=True)

    def decode(
        self, backend, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None
    ):
        """In place of `forward_decode`: write as it does, then attend over FP8 rows."""
        if k is not None and save_kv_cache:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            where = KVWriteLoc.for_batch(forward_batch)
            if k_rope is None:
                self.pool.set_kv_buffer(layer, where, k, v)
            else:
                self.pool.set_mla_kv_buffer(layer, where, k, k_rope)
        heads, rank = layer.tp_q_head_num, layer.v_head_dim
        if q_rope is None:
            q = q.view(-1, heads, layer.head_dim)
            q, q_rope = q[..., :rank], q[..., rank:]
        q_nope = q.view(-1, heads, rank).contiguous()
        q_rope = q_rope.reshape(-1, heads, layer.head_dim - rank).contiguous()
        self.pool.get_key_buffer(layer.layer_id)
        out = torch.empty_like(q_nope)
        if not len(out):
            return out.view(-1, heads * rank)
        planned = backend.forward_metadata.decode_wrapper._shadowkv
        planned.run(q_nope, q_rope, self.stored(layer.layer_id), out)
        return out.view(-1, heads * rank)


READERS = {
    "full_cast": Reader,
    "vector_cast": VectorCast,
    "shadow": Shadow,
    "gather_cast": GatherCast,
    "fused_fp8": FusedFP8,
}

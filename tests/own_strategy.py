"""A strategy that the lab does not have, as a user writes one in a notebook cell."""

from contextlib import contextmanager
from dataclasses import dataclass

from shadowkv_lab import STRATEGIES, Moves, OutOfRange, Strategy, gather_cast, to_fp8


@contextmanager
def hot_set():
    """`HotSet`, known to the lab for as long as this lasts."""

    @dataclass(frozen=True)
    class HotSet(Strategy):
        """FP8 pool, and a BF16 copy of the live rows alone: O(new tokens) casts, no second pool."""

        rows: int = 1024

        name, title = "hot_set", "hot set"
        compact = True  # attention reads row i for live token i

        def buffers(self, model):
            return {"hot": self.rows}

        def moves(self, model, P, L, R):
            return Moves(0, model.row_bytes("bf16") * L, model.row_bytes("fp8+bf16") * R)

        def prepare(self, step):
            if (live := step.batch.live_tokens) > self.rows:
                raise OutOfRange(
                    f"A hot set of {self.rows} rows for {live} live tokens", f"{live} or more"
                )
            for fp8, own in zip(step.pool.fp8, step.buffers, strict=True):
                gather_cast(fp8, step.batch.live_slots, own["hot"][:live])

        def advance(self, step, turn):
            if step.batch.page_size > 1:  # the tokens on a request's last page changed with it
                self.prepare(step)

        def write(self, step, layer):
            super().write(step, layer)
            ends = step.batch.kv_len.cumsum(0) - 1
            new = to_fp8(step.rows[layer]).bfloat16()
            step.buffers[layer]["hot"].index_copy_(0, ends, new)

        def readable(self, step, layer):
            return step.buffers[layer]["hot"]

    try:
        yield HotSet
    finally:
        STRATEGIES.pop("hot_set", None)

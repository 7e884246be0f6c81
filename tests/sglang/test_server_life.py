"""A server's life as sequences of pool operations, on SGLang's own pools, allocators and cache.

Requests start with what the prefix cache has of them, are prefilled in chunks, decode in mixed and
padded batches, are aborted, retracted to the CPU, resumed in other slots, or finish into the cache,
which is evicted from. After each operation every live slot's mirror is bf16(e4m3(row)) bit for bit,
where the row is what was computed for that token, not what the pool says, and e4m3 is rounded here.
"""

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import attached, layer, pool

LAYERS = 3
E4M3 = np.array(  # the 127 finite values of e4m3 without their sign, in the order of their bits
    [
        (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    ]
)


def bf16_of_e4m3(row: torch.Tensor) -> torch.Tensor:
    """bf16(e4m3(row)) by the tables: to the nearest, ties to the even bits, 448 at most."""
    value = row.double().numpy()
    size = np.minimum(np.abs(value), E4M3[-1])
    above = np.searchsorted(E4M3, size).clip(1)
    low, high = E4M3[above - 1], E4M3[above]
    middle = (low + high) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    rounded = np.where(up, high, low)
    return torch.from_numpy(np.copysign(rounded, value)).bfloat16()


@cache
def row_of(tokens: tuple[int, ...], number: int) -> torch.Tensor:
    """The row [576] of the last of `tokens` in a layer: a prefix has one row, however it came."""
    seed = hash((tokens, number)) & 0x7FFFFFFF
    size = random.Random(seed).choice([0.01, 0.3, 4.0, 60.0])
    noise = torch.randn(576, generator=torch.Generator().manual_seed(seed))
    return (noise * size).bfloat16()


@cache
def mirrored(tokens: tuple[int, ...], number: int) -> torch.Tensor:
    """What a mirror must hold of that row, as bits."""
    return bf16_of_e4m3(row_of(tokens, number)).view(torch.int16)


@dataclass
class Request:
    """`slots` are those of the tokens whose rows are written; `spare` allocated and not yet used.

    The first `cached` slots belong to the prefix cache, whose `node` is locked.
    """

    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    cached: int = 0
    node: object = None
    on_cpu: object = None

    @property
    def own(self) -> list[int]:
        return self.slots[self.cached :] + self.spare


class Life:
    """One pool with its mirror, its allocator and its prefix cache; `rnd` decides what happens."""

    page_size, kind, pool_slots, words = 1, "MLATokenToKVPool", 96, 24

    def __init__(self, rnd: random.Random):
        self.rnd = rnd
        self.running: list[Request] = []
        self.retracted: list[Request] = []
        self.cached: dict[int, tuple[int, ...]] = {}  # slot: the tokens up to its own

        self.start_server()

    def start_server(self):
        from sglang.srt.mem_cache.allocator import (
            PagedTokenToKVPoolAllocator,
            TokenToKVPoolAllocator,
        )
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.real = pool(self.kind, self.pool_slots, layers=LAYERS)
        attached(self.real)
        common = dict(dtype=self.real.dtype, device="cpu", kvcache=self.real, need_sort=False)
        if self.page_size == 1:
            self.allocator = TokenToKVPoolAllocator(self.pool_slots, **common)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(self.pool_slots, self.page_size, **common)
        table = ReqToTokenPool(8, 512, "cpu", False)
        params = CacheInitParams(False, table, self.allocator, self.page_size)
        self.cache = RadixCache(params)

    def key(self, tokens):
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(token_ids=array("q", tokens))

    def take(self, request: Request, count: int) -> bool:
        """Allocate until `count` more slots are spare; if there are none the cache is evicted."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        missing = count - len(request.spare)
        if missing <= 0:
            return True
        missing = -(-missing // self.page_size) * self.page_size
        found = self.allocator.alloc(missing)
        if found is None:
            self.cache.evict(EvictParams(num_tokens=missing))
            self.forget()
            found = self.allocator.alloc(missing)
        if found is None:
            return False
        request.spare += found.tolist()
        return True

    def forget(self):
        """Keep of the cached slots those that the cache still has."""
        values = self.cache.all_values_flatten() if self.cache.root_node.children else []
        kept = set(map(int, values))
        seen["evicted"] += len(self.cached) > len(kept)
        self.cached = {slot: tokens for slot, tokens in self.cached.items() if slot in kept}

    def release(self, request: Request):
        if request.own:
            self.allocator.free(torch.tensor(request.own))
        if request.node is not None:
            self.cache.dec_lock_ref(request.node)
        request.slots, request.spare, request.cached, request.node = [], [], 0, None

    def start(self):
        """A new request; prompts of a family share their beginnings, as with a prefix cache."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        if len(self.running) > 4:
            return
        family, length = self.rnd.randrange(3), self.rnd.randint(1, 2 * self.words)
        drawn = random.Random(family)
        tokens = [drawn.randrange(50) for _ in range(length)]
        tokens += [60 + family] * self.rnd.randrange(2)
        hit = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens[:-1])))
        request = Request(tokens)
        if hit.device_prefix_len:
            found = self.cache.path_device_indices(hit.last_device_node)
            request.slots = found.tolist()[: hit.device_prefix_len]
            request.cached, request.node = len(request.slots), hit.last_device_node
            self.cache.inc_lock_ref(request.node)
            seen["prefix hit"] += 1
        self.running.append(request)

    def step(self):
        """One forward pass: some requests prefill a chunk, the others decode, in one batch."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        at, prefixes, kinds = [], [], set()
        chunk, padding = self.rnd.randint(1, self.words), self.rnd.randrange(4)
        picked = [r for r in self.running if self.rnd.random() < 0.8]
        for request in picked:
            waiting = len(request.tokens) - len(request.slots)
            if not waiting:  # all rows are written: it decodes one more token
                request.tokens.append(self.rnd.randrange(2))
                waiting = 1
            kinds.add("decode" if waiting == 1 else "prefill")
            count = min(waiting, chunk)
            if not self.take(request, count):
                continue
            seen["chunk"] += count < waiting
            for _ in range(count):
                request.slots.append(request.spare.pop(0))
                at.append(request.slots[-1])
                prefixes.append(tuple(request.tokens[: len(request.slots)]))
        if not at:
            return
        seen["mixed"] += len(kinds) == 2
        seen["padded"] += padding > 0
        where = torch.tensor(at + [0] * padding)  # a graph's padding writes to slot 0
        for number in range(LAYERS):
            rows = [row_of(prefix, number) for prefix in prefixes]
            rows = torch.stack(rows + [torch.randn(576).bfloat16()] * padding).unsqueeze(1)
            if padding % 2:
                latent, rope = rows[..., :512].contiguous(), rows[..., 512:].contiguous()
                self.real.set_mla_kv_buffer(layer(number), KVWriteLoc(where), latent, rope)
            else:
                self.real.set_kv_buffer(layer(number), KVWriteLoc(where), rows, rows[..., :512])

    def abort(self):
        """A client goes away, perhaps in the middle of its prefill."""
        if self.running:
            seen["abort"] += 1
            self.release(self.running.pop(self.rnd.randrange(len(self.running))))

    def retract(self):
        """The pool is short: a request's rows go to the CPU and its slots to others."""
        ready = [r for r in self.running if r.slots]
        if not ready:
            return
        request = self.rnd.choice(ready)
        self.running.remove(request)
        request.on_cpu = (
            self.allocator.get_cpu_copy(torch.tensor(request.slots)),
            len(request.slots),
        )
        self.release(request)
        self.retracted.append(request)

    def resume(self):
        if not self.retracted:
            return
        request = self.retracted[0]
        copy, count = request.on_cpu
        if not self.take(request, count):
            return
        self.retracted.pop(0)
        request.slots, request.spare = request.spare[:count], request.spare[count:]
        self.allocator.load_cpu_copy(copy, torch.tensor(request.slots))
        request.on_cpu = None
        seen["resumed"] += 1
        self.running.append(request)

    def finish(self):
        """A request ends into the prefix cache, whole pages of it; what the cache had is freed."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        ready = [r for r in self.running if r.slots]
        if not ready:
            return
        request = self.rnd.choice(ready)
        self.running.remove(request)
        whole = len(request.slots) // self.page_size * self.page_size
        if whole > request.cached:
            value = torch.tensor(request.slots[:whole])
            done = self.cache.insert(
                InsertParams(key=self.key(request.tokens[:whole]), value=value.clone())
            )
            again = request.slots[request.cached : done.prefix_len]
            if again:
                self.allocator.free(torch.tensor(again))
            kept = request.slots[max(done.prefix_len, request.cached) : whole]
            for i, slot in enumerate(kept, whole - len(kept)):
                self.cached[slot] = tuple(request.tokens[: i + 1])
            request.cached = whole
            seen["finished"] += 1
        self.release(request)

    def evict(self):
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=self.rnd.randint(1, 64)))
        self.forget()

    def live(self) -> dict[int, tuple[int, ...]]:
        """Every slot that somebody may read, and the tokens up to its own."""
        found = dict(self.cached)
        for request in self.running:
            for i, slot in enumerate(request.slots):
                found[slot] = tuple(request.tokens[: i + 1])
        return found

    def check(self):
        """Every live slot's mirror is its row, rounded here."""
        live = self.live()
        if not live:
            return
        slots = torch.tensor(list(live))
        assert 0 not in live and len(set(live)) == len(live)
        for number in range(LAYERS):
            wanted = torch.stack([mirrored(tokens, number) for tokens in live.values()])
            found = self.real._shadowkv.copies[number][slots].view(torch.int16)
            assert torch.equal(found, wanted), f"layer {number}"

    OPERATIONS = dict(start=4, step=8, finish=3, retract=2, resume=3, abort=1, evict=1)

    def act(self):
        getattr(self, self.rnd.choices(*zip(*self.OPERATIONS.items(), strict=True))[0])()


class PagedLife(Life):
    """GLM-5's pool: pages of 64, index keys beside the rows, prompts of up to four pages."""

    page_size, kind, pool_slots, words = 64, "DSATokenToKVPool", 1024, 120


LIVES = [Life, PagedLife]
seen: Counter = Counter()  # how often what this file is about came to pass


@pytest.mark.parametrize("life", LIVES)
def test_the_mirror_through_a_server_s_life(chosen, life):
    chosen("shadow")
    seen.clear()

    @settings(max_examples=25, derandomize=True, deadline=None, database=None)
    @given(st.integers(0, 1 << 20), st.integers(20, 60))
    def run(seed, steps):
        made = life(random.Random(seed))
        for _ in range(steps):
            made.act()
            made.check()
        made.real._shadowkv.check()

    run()
    happened = ("prefix hit", "mixed", "padded", "chunk", "abort", "resumed", "evicted", "finished")
    assert all(seen[what] >= 3 for what in happened), seen


def test_the_rounding_of_the_oracle():
    """Ties, subnormals, the largest value and beyond it, each by hand."""
    values = [0.0, -0.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 17.0, 19.0, 440.0, 448.0, 1e4, -0.3]
    wanted = [0.0, -0.0, 2.0**-9, 0.0, 2.0**-8, 16.0, 20.0, 448.0, 448.0, 448.0, -0.3125]
    found = bf16_of_e4m3(torch.tensor(values, dtype=torch.float64).bfloat16())
    exact = torch.tensor(wanted, dtype=torch.float64).bfloat16()
    assert torch.equal(found.view(torch.int16), exact.view(torch.int16))


def everyone(life):
    """A step in which all requests take part."""
    life.rnd = random.Random(1)
    life.rnd.random = lambda: 0.0
    life.step()


@pytest.mark.parametrize("path", ["wrote", "wrote_all"])
def test_a_mirror_that_missed_a_path_would_be_found(chosen, monkeypatch, path):
    """The invariant is no formality: without a hook's effect it fails."""
    from shadowkv_lab.server.plugin.readers import Shadow

    chosen("shadow")
    life = Life(random.Random(1))
    request = Request([1, 2, 3])
    life.running.append(request)

    everyone(life)
    life.check()
    monkeypatch.setattr(Shadow, path, lambda *_: None)
    with pytest.raises(AssertionError, match="layer 0"):
        if path == "wrote":
            everyone(life)
        else:
            life.running.remove(request)
            request.on_cpu = life.allocator.get_cpu_copy(torch.tensor(request.slots)), 3
            life.release(request)
            life.retracted.append(request)
            life.take(Request([9]), 3)  # others take its slots
            life.resume()
        life.check()

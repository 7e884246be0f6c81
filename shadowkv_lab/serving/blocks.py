"""The pool's pages as a serving engine counts them: what is free, and who may take it."""

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.serving.radix import RadixCache


class BlockManager:
    """Counts pages of `page_size` slots; which page a request gets does not change its time.

    `watermark` is the share of the pool that an admission must leave free, so that requests that
    run can grow (vLLM's rule; there 0.01). Requests that decode grow by one token per step, all
    together, so the manager keeps how many of them stand at each place within a page: with that,
    the pages that the next k steps take are known without looking at a single request. `cache`
    keeps the prefixes of finished requests, until their pages are needed.
    """

    def __init__(
        self,
        capacity_tokens: int,
        page_size: int = 1,
        watermark: float = 0.01,
        cache: RadixCache | None = None,
    ):
        if page_size < 1 or capacity_tokens < page_size:
            raise OutOfRange(
                f"A pool of {capacity_tokens:,} tokens in pages of {page_size}",
                "pages of 1 token or more, at least one of them",
            )
        if not 0 <= watermark < 1:
            raise OutOfRange(f"A watermark of {watermark}", "from 0 up to, but not including, 1")
        if cache and cache.block_tokens % page_size:
            raise OutOfRange(
                f"Prefixes in blocks of {cache.block_tokens} tokens over pages of {page_size}",
                "a page size that divides the block",
            )
        self.page_size, self.cache = page_size, cache
        self.total = self.free = capacity_tokens // page_size
        self.reserve = int(watermark * self.total)
        self.steps = 0  # decode steps so far
        self.decoding = 0  # requests that decode
        self.live_tokens = 0  # rows of the requests that decode
        self._places = [0] * page_size  # requests by (rows - steps) % page_size

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def available(self) -> int:
        """Pages that are free, or hold a prefix that nobody runs with."""
        if not self.cache:
            return self.free
        return self.free + self.cache.evictable * (self.cache.block_tokens // self.page_size)

    def can_allocate(self, tokens: int, idle: bool = False) -> bool:
        """Room above the watermark; a server that is `idle` takes whatever fits at all."""
        return self.pages(tokens) + (0 if idle else self.reserve) <= self.available

    def allocate(self, tokens: int) -> None:
        self._take(self.pages(tokens))

    def deallocate(self, tokens: int) -> None:
        self.free += self.pages(tokens)

    def start_decode(self, tokens: int) -> None:
        """A request with `tokens` rows decodes from now on."""
        self._places[(tokens - self.steps) % self.page_size] += 1
        self.decoding += 1
        self.live_tokens += tokens

    def stop_decode(self, tokens: int) -> None:
        self._places[(tokens - self.steps) % self.page_size] -= 1
        self.decoding -= 1
        self.live_tokens -= tokens

    def pages_for(self, steps: int) -> int:
        """New pages that the next `steps` decode steps take."""
        if self.page_size == 1:
            return steps * self.decoding
        whole, rest = divmod(steps, self.page_size)
        places = (self._places[-(self.steps + j) % self.page_size] for j in range(rest))
        return whole * self.decoding + sum(places)

    def can_append(self) -> bool:
        """Whether every request that decodes can write one more row."""
        return self.pages_for(1) <= self.available

    def append(self, steps: int) -> None:
        """Every request that decodes writes `steps` more rows."""
        self._take(self.pages_for(steps))
        self.live_tokens += steps * self.decoding
        self.steps += steps

    def steps_until_full(self, wanted: int) -> int:
        """How many of the next `wanted` decode steps find room."""
        available = self.available
        if self.decoding * self.pages(wanted) <= available:
            return wanted
        whole = min(available // self.decoding, wanted // self.page_size)
        room, steps = available - whole * self.decoding, whole * self.page_size
        while steps < wanted:
            room -= self._places[-(self.steps + steps) % self.page_size]
            if room < 0:
                break
            steps += 1
        return steps

    def _take(self, pages: int) -> None:
        self.free -= pages
        if self.free < 0 and self.cache:
            each = self.cache.block_tokens // self.page_size
            self.free += each * self.cache.evict(-(self.free // each))

    def check_integrity(self, tokens_held: list[int]) -> None:
        """Allocated + cached + free = capacity, counted anew from the rows that each request
        holds for itself."""
        taken = sum(map(self.pages, tokens_held))
        if self.cache:
            self.cache.check_integrity()
            taken += self.cache.size * self.pages(self.cache.block_tokens)
        if taken + self.free != self.total or self.free < 0:
            raise AssertionError(f"{taken} taken + {self.free} free != {self.total} pages")

"""The pool's pages as a serving engine counts them: who may come in, and when it is full."""

from shadowkv_lab.errors import OutOfRange


class BlockManager:
    """Counts pages of `page_tokens` slots; which page a request gets does not change its time.

    `watermark` is the share of the pool that an admission must leave free, so that requests that
    run can grow (vLLM's rule; there 0.01). Requests that decode grow by one token a step, all
    together, so the manager keeps how many of them stand at each place within a page: with that,
    the pages that the next k steps take are known without looking at a single request.
    """

    def __init__(self, capacity_tokens: int, page_tokens: int = 1, watermark: float = 0.01):
        if page_tokens < 1 or capacity_tokens < page_tokens:
            raise OutOfRange(
                f"A pool of {capacity_tokens:,} tokens in pages of {page_tokens}",
                "pages of 1 token or more, at least one of them",
            )
        if not 0 <= watermark < 1:
            raise OutOfRange(f"A watermark of {watermark}", "a share from 0 up to, not with, 1")
        self.page_tokens = page_tokens
        self.total = self.free = capacity_tokens // page_tokens
        self.reserve = int(watermark * self.total)
        self.steps = 0  # decode steps so far
        self.growing = 0  # requests that decode
        self.live_tokens = 0  # rows of the requests that decode
        self._places = [0] * page_tokens  # requests by (rows - steps) % page_tokens

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def fits_at_all(self, tokens: int) -> bool:
        return self.pages(tokens) <= self.total

    def can_allocate(self, tokens: int) -> bool:
        """Room for a prompt above the watermark; an empty pool takes whatever fits at all."""
        reserve = 0 if self.free == self.total else self.reserve
        return self.pages(tokens) + reserve <= self.free

    def allocate(self, tokens: int) -> None:
        self.free -= self.pages(tokens)

    def release(self, tokens: int) -> None:
        self.free += self.pages(tokens)

    def start_growing(self, tokens: int) -> None:
        """A request with `tokens` rows decodes from now on."""
        self._places[(tokens - self.steps) % self.page_tokens] += 1
        self.growing += 1
        self.live_tokens += tokens

    def stop_growing(self, tokens: int) -> None:
        self._places[(tokens - self.steps) % self.page_tokens] -= 1
        self.growing -= 1
        self.live_tokens -= tokens

    def pages_for(self, steps: int) -> int:
        """New pages that the next `steps` decode steps take."""
        whole, rest = divmod(steps, self.page_tokens)
        places = (self._places[-(self.steps + j) % self.page_tokens] for j in range(rest))
        return whole * self.growing + sum(places)

    def steps_until_full(self, wanted: int) -> int:
        """How many of the next `wanted` steps find room."""
        if self.growing * self.pages(wanted) <= self.free:
            return wanted
        whole = min(self.free // self.growing, wanted // self.page_tokens)
        room, steps = self.free - whole * self.growing, whole * self.page_tokens
        while steps < wanted:
            room -= self._places[-(self.steps + steps) % self.page_tokens]
            if room < 0:
                break
            steps += 1
        return steps

    def grow(self, steps: int) -> None:
        """Every request that decodes writes `steps` more rows."""
        self.free -= self.pages_for(steps)
        self.live_tokens += steps * self.growing
        self.steps += steps

    def check_integrity(self, tokens_held: list[int]) -> None:
        """Allocated + free = capacity, counted anew from the rows that each request holds."""
        allocated = sum(map(self.pages, tokens_held))
        if allocated + self.free != self.total or self.free < 0:
            raise AssertionError(f"{allocated} allocated + {self.free} free != {self.total} pages")

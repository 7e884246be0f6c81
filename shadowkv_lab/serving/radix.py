"""Prefixes kept for reuse, as SGLang's radix cache and vLLM's prefix cache keep them."""

from collections import OrderedDict
from collections.abc import Sequence


class RadixCache:
    """Blocks of `block_tokens` rows by their hash, which stands for all the text before them too.

    Requests lock the blocks that they run with. A block that nobody locks stays, and is evicted
    where its pages are needed: longest unused first, the end of a prefix before its beginning. A
    request that finds its blocks and no room makes them the newest, as in SGLang.
    """

    def __init__(self, block_tokens: int):
        self.block_tokens = block_tokens
        self._locks: dict[int, int] = {}  # requests that run with a block
        self._unused: OrderedDict[int, None] = OrderedDict()
        self.shared_tokens = 0  # rows that running requests would hold more if none were shared

    @property
    def size(self) -> int:
        """Blocks in all."""
        return len(self._locks) + len(self._unused)

    @property
    def evictable(self) -> int:
        """Blocks that nobody runs with."""
        return len(self._unused)

    def match(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks are here."""
        for count, block in enumerate(blocks):
            if block not in self._locks and block not in self._unused:
                return count
        return len(blocks)

    def lock(self, blocks: Sequence[int]) -> int:
        """One more request runs with these blocks; returns how many of them are new here."""
        new = 0
        for block in blocks:
            count = self._locks.get(block, 0)
            if count:
                self.shared_tokens += self.block_tokens
            elif block in self._unused:
                del self._unused[block]
            else:
                new += 1
            self._locks[block] = count + 1
        return new

    def unlock(self, blocks: Sequence[int]) -> None:
        """One request less runs with these blocks."""
        for block in reversed(blocks):
            if self._locks[block] > 1:
                self._locks[block] -= 1
                self.shared_tokens -= self.block_tokens
            else:
                del self._locks[block]
                self._unused[block] = None

    def evict(self, count: int) -> int:
        """Drop `count` blocks, or as many as nobody runs with; returns how many."""
        count = min(count, len(self._unused))
        for _ in range(count):
            self._unused.popitem(last=False)
        return count

    def check_integrity(self) -> None:
        both = self._locks.keys() & self._unused.keys()
        shared = sum(n - 1 for n in self._locks.values()) * self.block_tokens
        if both or min(self._locks.values(), default=1) < 1 or shared != self.shared_tokens:
            raise AssertionError(f"{len(both)} blocks used and unused, {shared} tokens shared")

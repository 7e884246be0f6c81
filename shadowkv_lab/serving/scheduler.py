"""Who runs: first come first served, chunked prefill, preemption by recompute, newest first."""

import heapq
from collections import deque
from dataclasses import dataclass

from shadowkv_lab.serving.blocks import BlockManager


@dataclass(slots=True, eq=False)
class Request:
    """One request; times in femtoseconds, -1 where it has not come to that."""

    id: int
    arrival: int
    prompt: int
    output: int
    generated: int = 0  # tokens so far; while it decodes, `steps - born` counts them instead
    rows: int = 0  # rows to prefill when it waits or prefills
    prefilled: int = 0  # of `rows`
    born: int = 0  # the step count at which it would have had no token
    decoding: bool = False
    admitted: int = -1  # first admission
    first: int = -1  # first token
    last: int = -1  # last token before it was preempted
    end: int = -1
    preemptions: int = 0

    @property
    def most_rows(self) -> int:
        """Rows it holds at its end; its last token is never written."""
        return self.prompt + self.output - 1


class Scheduler:
    """Waiting and running requests over one `BlockManager`.

    In a step, requests that decode grow first: where the pool is full, the newest running request
    gives up all its rows and goes back to the head of the queue, until the others fit. Then up
    to `chunk_tokens` prompt tokens are prefilled: first those of a prompt begun, then those of
    the head of the queue, as long as its whole prompt fits above the watermark. Nobody overtakes
    the head, so that nobody comes in after a preemption (vLLM has a rule for it; here what was
    given up has gone to those that grew).
    """

    def __init__(self, blocks: BlockManager, chunk_tokens: int, max_running: int):
        self.blocks, self.chunk_tokens, self.max_running = blocks, chunk_tokens, max_running
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # in the order of admission
        self.prefilling: deque[Request] = deque()
        self.ends: list[tuple[int, int]] = []  # heap of (step count at its end, id)
        self.admissions = self.preemptions = self.recomputed_tokens = 0

    def add(self, request: Request) -> bool:
        """Queue a request; False if it could never run, however empty the pool."""
        if not self.blocks.fits_at_all(request.most_rows):
            return False
        request.rows = request.prompt
        self.waiting.append(request)
        return True

    def rows_held(self, request: Request) -> int:
        """Pool rows of a running request; a prompt has all its rows from its admission on."""
        if not request.decoding:
            return request.rows
        return request.prompt + self.blocks.steps - request.born - 1

    def make_room(self, now: int) -> None:
        """Preempt until each request that decodes can grow by a token."""
        while self.blocks.pages_for(1) > self.blocks.free:
            self.preempt(self.running[next(reversed(self.running))], now)

    def preempt(self, request: Request, now: int) -> None:
        rows = self.rows_held(request)
        if request.decoding:
            self.recomputed_tokens += rows
            self.blocks.stop_growing(rows)
            request.decoding, request.last = False, now
            request.generated = self.blocks.steps - request.born
        else:
            self.recomputed_tokens += request.prefilled
            self.prefilling.remove(request)
        self.blocks.release(rows)
        request.rows, request.prefilled = request.prompt + request.generated, 0
        request.preemptions += 1
        self.preemptions += 1
        del self.running[request.id]
        self.waiting.appendleft(request)

    def prefill(self, now: int) -> tuple[int, list[Request]]:
        """Prompt tokens of this step, and the requests whose prompts they complete."""
        budget, done = self.chunk_tokens, []
        while budget and (self.prefilling or self.admit(now)):
            request = self.prefilling[0]
            chunk = min(budget, request.rows - request.prefilled)
            request.prefilled += chunk
            budget -= chunk
            if request.prefilled == request.rows:
                done.append(self.prefilling.popleft())
        return self.chunk_tokens - budget, done

    def admit(self, now: int) -> bool:
        """Give the head of the queue its rows, if there are enough."""
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        if not self.blocks.can_allocate(self.waiting[0].rows):
            return False
        request = self.waiting.popleft()
        self.blocks.allocate(request.rows)
        self.running[request.id] = request
        self.prefilling.append(request)
        self.admissions += 1
        if request.admitted < 0:
            request.admitted = now
        return True

    def decode(self, request: Request) -> None:
        """A prefilled request has its next token and decodes from the next step on."""
        request.generated += 1
        request.born = self.blocks.steps - request.generated
        request.decoding = True
        self.blocks.start_growing(self.rows_held(request))
        heapq.heappush(self.ends, (request.born + request.output, request.id))

    def finished(self) -> list[Request]:
        """Requests that have all their tokens now; they leave the pool."""
        done = []
        while self.ends and self.ends[0][0] <= self.blocks.steps:
            end, id = heapq.heappop(self.ends)
            request = self.running.get(id)
            # An entry from before a preemption: the request waits, prefills, or ends later.
            if request is None or not request.decoding or request.born + request.output != end:
                continue
            rows = self.rows_held(request)
            self.blocks.stop_growing(rows)
            self.blocks.release(rows)
            del self.running[id]
            done.append(request)
        return done

    def steps_to_next_end(self) -> int:
        """Further decode steps until the next request ends (or a stale entry is dropped)."""
        return max(0, self.ends[0][0] - self.blocks.steps)

"""Who runs in a step: first come first served, chunked prefill, recompute where the pool is full.

`Scheduler` is vLLM's, `SGLangScheduler` SGLang's (0.5.23: managers/schedule_policy.py and
schedule_batch.py); both count over one `BlockManager`.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shadowkv_lab.serving.blocks import BlockManager


@dataclass(slots=True, eq=False)
class Request:
    """One request; times in picoseconds, -1 until they happen."""

    id: int
    arrival: int
    prompt: int
    output: int
    blocks: Sequence[int] = ()  # hashes of the prompt's full blocks, where the trace has them
    generated: int = 0  # tokens so far; while it decodes, `steps - born` counts them instead
    rows: int = 0  # rows it has once its prompt, and what it had generated, are prefilled
    prefilled: int = 0  # of `rows`, those found in the cache included
    cached: int = 0  # of its blocks, those that it reads in the cache
    born: int = 0  # the step count at which it would have had no token
    decoding: bool = False
    admitted: int = -1  # first admission
    first: int = -1  # first token
    last: int = -1  # newest token that did not come from the last decode step
    preemptions: int = 0


class Batch(NamedTuple):
    """What one step computes. `prefix` are rows that its prompts had before this step."""

    decode: bool
    chunk: int  # prompt tokens
    prefix: int
    done: list[Request]  # requests whose prompts are complete after it


class Scheduler:
    """vLLM's: a step decodes, and prefills beside it.

    Requests that decode grow first: where the pool is full, the newest running request gives up
    all its rows and goes back to the head of the queue, until the others fit. Then up to
    `chunk_tokens` prompt tokens are prefilled: first those of a prompt begun, then those of the
    head of the queue, as long as its whole prompt fits above the watermark. Requests are admitted
    strictly in order, and none in the step of a preemption.
    """

    def __init__(self, blocks: BlockManager, chunk_tokens: int, max_running: int):
        self.blocks, self.chunk_tokens, self.max_running = blocks, chunk_tokens, max_running
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # in the order of admission
        self.prefilling: deque[Request] = deque()
        self.ends: list[tuple[int, int]] = []  # heap of (step count at its end, id)
        self.decoded_at = 0  # end of the last decode step
        self.admissions = self.preemptions = self.recomputed_tokens = self.cached_tokens = 0

    def add(self, request: Request) -> bool:
        """Queue a request; False if it could never run, however empty the pool."""
        if self.blocks.pages(self.rows_needed(request)) > self.blocks.total:
            return False
        request.rows = request.prompt
        self.waiting.append(request)
        return True

    def rows_needed(self, request: Request) -> int:
        """Rows of a pool in which the request can run alone; its last token is never written."""
        return request.prompt + request.output - 1

    def rows(self, request: Request) -> int:
        """Rows of a running request; a prompt has all its rows from its admission on."""
        if not request.decoding:
            return request.rows
        return request.prompt + self.blocks.steps - request.born - 1

    def own_rows(self, request: Request) -> int:
        """Rows that a running request holds outside the prefix cache."""
        rows = self.rows(request)
        return rows - request.cached * self.blocks.cache.block_tokens if request.cached else rows

    def schedule(self, now: int) -> Batch:
        """Rows for the next step, which begins `now`, and what it computes."""
        before = self.preemptions
        self.append(now)
        if self.preemptions > before:
            return Batch(True, 0, 0, [])
        return Batch(self.blocks.decoding > 0, *self.prefill(now))

    def append(self, now: int) -> None:
        """A row for each request that decodes; preempts until they fit."""
        while not self.blocks.can_append():
            self.preempt(self.running[next(reversed(self.running))], now)
        self.blocks.append(1)

    def preempt(self, request: Request, now: int) -> None:
        """Take a running request's rows; it waits at the head of the queue."""
        own = self.own_rows(request)
        if request.decoding:
            self.recomputed_tokens += own
            self.stop_decode(request)
            request.last = max(request.last, self.decoded_at)
            request.generated = self.blocks.steps - request.born
        else:
            self.recomputed_tokens += request.prefilled - (request.rows - own)
            self.prefilling.remove(request)
        self.release(request, own)
        request.rows, request.prefilled = request.prompt + request.generated, 0
        request.preemptions += 1
        self.preemptions += 1
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        self.waiting.appendleft(request)

    def release(self, request: Request, own_rows: int) -> None:
        self.blocks.deallocate(own_rows)
        if request.cached:
            self.blocks.cache.unlock(request.blocks[: request.cached])
            request.cached = 0
        del self.running[request.id]

    def prefill(self, now: int) -> tuple[int, int, list[Request]]:
        """Prompt tokens of this step, the rows before them, and the requests that it completes."""
        budget, prefix, done = self.chunk_tokens, 0, []
        while budget and (self.prefilling or self.admit(now, done)):
            request = self.prefilling[0]
            prefix += request.prefilled
            chunk = min(budget, request.rows - request.prefilled)
            request.prefilled += chunk
            budget -= chunk
            if request.prefilled == request.rows:
                done.append(self.prefilling.popleft())
        return self.chunk_tokens - budget, prefix, done

    def admit(self, now: int, done: list[Request]) -> bool:
        """Give the head of the queue its rows, if there are enough; `done` goes before it."""
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        request = self.waiting[0]
        hit = self.look_up(request)
        if not self.can_allocate(request, request.rows - hit, done):
            if hit:
                self.blocks.cache.unlock(request.blocks[: request.cached])
                request.cached = 0
            return False
        self.waiting.popleft()
        self.blocks.allocate(request.rows - hit)
        request.prefilled = hit
        self.cached_tokens += hit
        self.running[request.id] = request
        self.prefilling.append(request)
        self.admissions += 1
        if request.admitted < 0:
            request.admitted = now
        return True

    def look_up(self, request: Request) -> int:
        """Lock the blocks of its prompt that are cached; their rows. One is always computed."""
        if not self.blocks.cache:
            return 0
        size = self.blocks.cache.block_tokens
        usable = request.blocks[: (request.prompt - 1) // size]
        request.cached = self.blocks.cache.match(usable)
        self.blocks.cache.lock(usable[: request.cached])
        return request.cached * size

    def can_allocate(self, request: Request, rows: int, done: list[Request]) -> bool:
        """Room for the `rows` of a prompt that are not cached."""
        return self.blocks.can_allocate(rows, idle=not self.running)

    def start_decode(self, request: Request) -> None:
        """A prefilled request has its next token and decodes from the next step on."""
        blocks = self.blocks
        if blocks.cache:  # its prompt can be shared from now on
            new = blocks.cache.lock(request.blocks[request.cached :])
            double = len(request.blocks) - request.cached - new
            blocks.deallocate(double * blocks.cache.block_tokens)
            request.cached = len(request.blocks)
        request.generated += 1
        request.born = blocks.steps - request.generated
        request.decoding = True
        blocks.start_decode(self.rows(request))
        heapq.heappush(self.ends, (request.born + request.output, request.id))

    def stop_decode(self, request: Request) -> None:
        self.blocks.stop_decode(self.rows(request))
        request.decoding = False

    def postprocess(self, batch: Batch, now: int) -> list[Request]:
        """At the end of a step: completed prompts begin to decode; who has all tokens leaves."""
        for request in batch.done:
            self.start_decode(request)
        finished = []
        while self.ends and self.ends[0][0] <= self.blocks.steps:
            end, id = heapq.heappop(self.ends)
            request = self.running.get(id)
            # An entry from before a preemption: the request waits, prefills, or ends later.
            if request is None or not request.decoding or request.born + request.output != end:
                continue
            own = self.own_rows(request)
            self.stop_decode(request)
            self.release(request, own)
            finished.append(request)
        return finished

    def steps_to_next_end(self) -> int:
        """Further decode steps until the next request ends (or a stale entry is dropped)."""
        return max(0, self.ends[0][0] - self.blocks.steps)

    def idle(self) -> None:
        """Nothing runs and nothing waits."""


class SGLangScheduler(Scheduler):
    """SGLang's: a step prefills, or decodes where nothing can be prefilled.

    The head of the queue is admitted where the rows of its prompt, what it may still generate and
    a page are fewer than what is available, less `new_token_ratio` x what the requests that decode
    may still generate, and less what those of this batch may; of each request's at most
    `CLIP_TOKENS`. `max_new_tokens` is what each request asks for at most (None: as many tokens as
    it gets, as a benchmark asks; without `ignore_eos`). Where the head finds no room, nobody is
    asked again until a request leaves.

    The ratio falls with each decode step. Where the next row does not fit, requests are retracted,
    those with the fewest generated tokens first and of those the longest prompt, and go to the
    *end* of the queue; the ratio becomes what those that remain have generated, and
    `RETRACT_STEPS` more of each, over what they may. It begins anew when the server is idle.
    """

    # Environment's defaults in 0.5.23, the ratio in billionths: k steps then equal k times one.
    ONE = 10**9
    INITIAL, LEAST, DECAY = 700_000_000, 98_000_000, 1_003_333  # 0.7, x 0.14, in 600 steps
    CLIP_TOKENS = 4096
    RETRACT_STEPS = 20

    def __init__(
        self,
        blocks: BlockManager,
        chunk_tokens: int,
        max_running: int,
        max_new_tokens: int | None = None,
    ):
        super().__init__(blocks, chunk_tokens, max_running)
        self.max_new_tokens = max_new_tokens
        self.full = False  # SGLang's batch_is_full
        self.ratio_from = self.INITIAL, 0  # the ratio at its last change, and the step count then
        self.ends_at = 0  # sum of born + may generate, over the requests that decode
        self.clipped: dict[int, Request] = {}  # those that decode and may exceed `CLIP_TOKENS`

    def may_generate(self, request: Request) -> int:
        """Tokens that the engine must expect of a request, those it has included."""
        return max(self.max_new_tokens or 0, request.output)

    def rows_needed(self, request: Request) -> int:
        return request.prompt + self.may_generate(request) + self.blocks.page_size + 1

    @property
    def new_token_ratio(self) -> int:
        """In billionths."""
        ratio, at = self.ratio_from
        if self.blocks.steps == at:
            return ratio
        return max(self.LEAST, ratio - self.DECAY * (self.blocks.steps - at))

    def schedule(self, now: int) -> Batch:
        chunk, *rest = self.prefill(now)
        if chunk:
            return Batch(False, chunk, *rest)
        self.append(now)
        return Batch(True, 0, 0, [])

    def append(self, now: int) -> None:
        retract = not self.blocks.can_append()
        if retract:
            # Sorting is stable: of equals the one that was admitted last goes first.
            order = sorted(self.running.values(), key=lambda r: (r.born, r.prompt))
            while not self.blocks.can_append():
                self.preempt(order.pop(), now)
            generated = sum(self.blocks.steps - r.born for r in order)
            most = sum(map(self.may_generate, order))
            ratio = (generated + self.RETRACT_STEPS * len(order)) * self.ONE // (most + 1)
            self.full = False
        self.blocks.append(1)
        if retract:
            self.ratio_from = min(self.ONE, ratio), self.blocks.steps

    def requeue(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self, now: int, done: list[Request]) -> bool:
        if self.full:
            return False
        admitted = super().admit(now, done)
        self.full = not admitted and bool(self.waiting)
        return admitted

    def can_allocate(self, request: Request, rows: int, done: list[Request]) -> bool:
        clip, page = self.CLIP_TOKENS, self.blocks.page_size
        wanted = rows + min(self.may_generate(request) - request.generated, clip) + page
        promised = sum(min(self.may_generate(r), clip) + page for r in done)
        left = self.blocks.available * page - promised - wanted
        return left * self.ONE > self.new_token_ratio * self.still_to_come()

    def still_to_come(self) -> int:
        """Tokens that those who decode may still generate, of each `CLIP_TOKENS` at most."""
        steps = self.blocks.steps
        tokens = self.ends_at - self.blocks.decoding * steps
        for id, request in [*self.clipped.items()]:
            beyond = request.born + self.may_generate(request) - steps - self.CLIP_TOKENS
            if beyond > 0:
                tokens -= beyond
            else:
                del self.clipped[id]
        return tokens

    def start_decode(self, request: Request) -> None:
        super().start_decode(request)
        end = request.born + self.may_generate(request)
        self.ends_at += end
        if end - self.blocks.steps > self.CLIP_TOKENS:
            self.clipped[request.id] = request

    def stop_decode(self, request: Request) -> None:
        super().stop_decode(request)
        self.ends_at -= request.born + self.may_generate(request)
        self.clipped.pop(request.id, None)

    def postprocess(self, batch: Batch, now: int) -> list[Request]:
        finished = super().postprocess(batch, now)
        if finished:
            self.full = False
        return finished

    def idle(self) -> None:
        self.full, self.ratio_from = False, (self.INITIAL, self.blocks.steps)

"""A serving engine in simulated time: arrivals, queue, growth, preemption, one result."""

from collections.abc import Callable
from dataclasses import dataclass

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.serving.blocks import BlockManager
from shadowkv_lab.serving.results import Log, Results
from shadowkv_lab.serving.scheduler import Request, Scheduler
from shadowkv_lab.serving.steps import FS_PER_S, PiecewiseLinear, StepTime, piecewise
from shadowkv_lab.serving.traffic import Traffic, require_servable

PREFILL_TOKENS_PER_S = 4000.0
PREFILL_SOURCE = (
    "about 4,000 tok/s, single batch, GLM-5-NVFP4 on 8x RTX PRO 6000: rtx6kpro, published"
)


@dataclass(frozen=True)
class Engine:
    """One strategy's server. `step` is ms of (running, live tokens); see `PiecewiseLinear`.

    `chunk_tokens` are the prompt tokens that one step may prefill (SGLang's
    chunked_prefill_size), `page_tokens` its page size, `max_running` vLLM's max_num_seqs,
    `watermark` the share of the pool that an admission leaves free (vLLM: 0.01).
    `prefill_tokens_per_s` comes from `prefill_source`, on one machine; `prefill_provenance` says
    what it is for yours.
    """

    capacity_tokens: int
    step: StepTime
    label: str = ""
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    prefill_source: str = PREFILL_SOURCE
    prefill_provenance: str = "assumed"
    chunk_tokens: int = 2048
    page_tokens: int = 1
    max_running: int = 256
    watermark: float = 0.01

    def __post_init__(self):
        if self.prefill_tokens_per_s <= 0:
            raise OutOfRange(f"A prefill of {self.prefill_tokens_per_s} tokens/s", "above 0")
        if self.chunk_tokens < 1 or self.max_running < 1:
            what = f"A chunk of {self.chunk_tokens} tokens, {self.max_running} running requests"
            raise OutOfRange(what, "1 or more of each")
        self.blocks()

    def blocks(self) -> BlockManager:
        return BlockManager(self.capacity_tokens, self.page_tokens, self.watermark)


def simulate(
    engine: Engine,
    traffic: Traffic,
    *,
    leap: bool = True,
    overload: bool = False,
    observe: Callable[[int, Scheduler], None] | None = None,
) -> Results:
    """Serve `traffic` on `engine` and say how it went; the same input gives the same bytes.

    Time runs in steps, one after another, as in vLLM V1 and SGLang's mixed chunks:

    1. A step begins with the requests that arrived by then. In a closed loop the next one arrives
       when another ends.
    2. Each request that decodes takes a row for its newest token; `Scheduler` says what happens
       in a full pool, and whose prompts are prefilled. A prompt, and what a preempted request had
       generated, takes all its rows at its admission.
    3. The step lasts step(running, live) + prefilled tokens / prefill rate: `running` are the
       requests that decode and `live` their rows, this step's included; with none it is the
       prefill alone. Adding the two is SGLang's order (a prefill batch, then a decode batch); a
       fused batch would share its weight reads and last a little less.
    4. At its end each request that decoded has a token; a completed prompt has its first token
       (or, after a preemption, its next), and decodes from the next step on. A request of G
       tokens so takes G - 1 decode steps. One with all its tokens leaves.

    Where nothing is prefilled, nothing changes but time until a request ends, the pool is full,
    or somebody arrives at an empty queue: `leap` crosses such steps at once, to the same results.
    A request longer than the pool is refused, reported, and does not hold up the rest. Prompts
    share no prefix. Raises `DoesNotFit` if the traffic asks for more prompt tokens/s than
    `engine` prefills, unless `overload`. `observe(now, scheduler)` is called at each event.
    """
    if not overload:
        require_servable(traffic, engine.prefill_tokens_per_s)
    return _Run(engine, traffic).serve(leap, observe)


class _Run:
    def __init__(self, engine: Engine, traffic: Traffic):
        self.engine, self.traffic = engine, traffic
        self.blocks = engine.blocks()
        self.scheduler = Scheduler(self.blocks, engine.chunk_tokens, engine.max_running)
        self.step: PiecewiseLinear = piecewise(engine.step, engine.capacity_tokens)
        self.prefill_fs = round(FS_PER_S / engine.prefill_tokens_per_s)
        self.log = Log()
        self.requests = [
            Request(id, round(at * FS_PER_S), prompt, output)
            for id, (at, prompt, output) in enumerate(traffic.rows())
        ]
        self.refused: list[Request] = []
        self.arrived = 0  # of `requests`
        self.in_flight = 0  # of a closed loop: arrived, neither ended nor refused
        self.now = 0

    def serve(self, leap: bool, observe: Callable[[int, Scheduler], None] | None) -> Results:
        scheduler = self.scheduler
        while True:
            self.arrive()
            if not scheduler.running and not scheduler.waiting:
                if self.arrived == len(self.requests):
                    break
                self.now = self.requests[self.arrived].arrival
                continue
            self.one_step(leap, observe)
        return Results(self.engine, self.traffic, self.requests, self.refused, scheduler, self.log)

    def one_step(self, leap: bool, observe: Callable[[int, Scheduler], None] | None) -> None:
        """One step, or several at once that only let time pass."""
        scheduler, blocks = self.scheduler, self.blocks
        before = len(scheduler.running), blocks.free
        events = scheduler.admissions + scheduler.preemptions
        scheduler.make_room(self.now)
        blocks.grow(1)
        chunk, prefilled = scheduler.prefill(self.now)
        if scheduler.admissions + scheduler.preemptions > events:
            self.log.sample(self.now, scheduler, *before)
        if observe:
            observe(self.now, scheduler)
        self.advance(chunk, self.clear_steps() if leap and not chunk else 1)
        self.finish(prefilled)

    def arrive(self) -> None:
        """Queue what has arrived by now; a closed loop sends one for each that ended."""
        limit = self.traffic.concurrency
        while self.arrived < len(self.requests):
            request = self.requests[self.arrived]
            if limit is None and request.arrival > self.now:
                break
            if limit is not None:
                if self.in_flight >= limit:
                    break
                request.arrival = self.now
            self.arrived += 1
            if self.scheduler.add(request):
                self.in_flight += 1
            else:
                self.refused.append(request)

    def clear_steps(self) -> int:
        """How many decode steps, this one with them, only let time pass; at least 1."""
        running, live = self.blocks.growing, self.blocks.live_tokens
        steps = 1 + self.blocks.steps_until_full(self.scheduler.steps_to_next_end())
        line = self.step.line(running, live)
        steps = min(steps, (line.last_live - live) // running + 1)
        # A blocked head of the queue stays blocked while others only grow, so that an arrival
        # behind it changes nothing.
        if self.scheduler.waiting or self.arrived == len(self.requests):
            return steps
        if self.traffic.concurrency is not None:
            return steps
        wait = self.requests[self.arrived].arrival - self.now
        low, high = 1, steps  # up to the first step that ends at or after the arrival
        while low < high:
            middle = (low + high) // 2
            if line.span_fs(live, running, middle) >= wait:
                high = middle
            else:
                low = middle + 1
        return low

    def advance(self, chunk: int, steps: int) -> None:
        """Let `steps` steps pass; with a `chunk` of prompt tokens it is one."""
        running, live, span = self.blocks.growing, self.blocks.live_tokens, chunk * self.prefill_fs
        if running:
            line = self.step.line(running, live)
            first = line.fs(live) + span
            span += line.span_fs(live, running, steps)
            self.log.gaps(running, first, line.slope_fs * running, steps, span)
            self.blocks.grow(steps - 1)
        self.now += span

    def finish(self, prefilled: list[Request]) -> None:
        """Tokens and departures at the end of a step."""
        scheduler, now = self.scheduler, self.now
        for request in prefilled:
            if request.first < 0:
                request.first = now
            else:
                self.log.gap(now - request.last)
            scheduler.decode(request)
        before = len(scheduler.running), self.blocks.free
        done = scheduler.finished()
        for request in done:
            request.end = now
            self.in_flight -= 1
        if done:
            self.log.sample(now, scheduler, *before)

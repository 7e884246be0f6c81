"""A serving engine in simulated time: arrivals, queue, growth, preemption, one result."""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.provenance import Provenance, assumed
from shadowkv_lab.serving.blocks import BlockManager
from shadowkv_lab.serving.lines import PS_PER_S, Lines, StepTime
from shadowkv_lab.serving.radix import RadixCache
from shadowkv_lab.serving.results import Log, Results
from shadowkv_lab.serving.scheduler import Batch, Request, Scheduler, SGLangScheduler
from shadowkv_lab.serving.traffic import Traffic, require_servable

PREFILL_TOKENS_PER_S = 4000.0
PREFILL_SOURCE = (
    "about 4,000 tok/s, single batch, GLM-5-NVFP4 on 8x RTX PRO 6000: rtx6kpro, published"
)
POLICIES = ("sglang", "vllm")
# SGLang 0.5.23: a prefill of at most this many tokens replays a captured graph, and a prefix of
# this many rows is gathered where there is none (SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD).
CAPTURED_TOKENS = GATHERED_TOKENS = 8192


@dataclass(frozen=True)
class Engine:
    """One strategy's server. `step` is ms of (running, live tokens).

    `policy` says whose scheduler admits, and with what: vLLM's `watermark` is the share of the pool
    that an admission leaves free, SGLang's `max_new_tokens` what each request asks for at most (see
    `SGLangScheduler`). `chunk_tokens` are the prompt tokens that one step may prefill (SGLang's
    chunked_prefill_size), `max_running` vLLM's max_num_seqs. `prefill` says where
    `prefill_tokens_per_s` comes from.

    `prefill_cast` is ms of (1, rows) that a prefill pays for its cast of the pool, where it reads
    the pool as a decode step does: in SGLang's dense backends (flashinfer_mla_backend.py line 761)
    every prefill of up to 8,192 tokens, since it replays a captured graph (`prefill_graphs`, the
    default in 0.5.23); without graphs those whose prompts have a prefix in the pool of 1 to 8,191
    rows. A longer prefix is gathered, and a prompt without one does not read the pool.
    """

    capacity_tokens: int
    step: StepTime
    label: str = ""
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    prefill: Provenance = field(default_factory=lambda: assumed(PREFILL_SOURCE))
    prefill_cast: StepTime | None = None
    prefill_graphs: bool = True
    chunk_tokens: int = 2048
    page_size: int = 1
    max_running: int = 256
    policy: str = "vllm"
    watermark: float = 0.01
    max_new_tokens: int | None = None

    def __post_init__(self):
        if not 0 < self.prefill_tokens_per_s < float("inf"):
            raise OutOfRange(f"A prefill of {self.prefill_tokens_per_s} tokens/s", "above 0")
        most = 1 if self.max_new_tokens is None else self.max_new_tokens
        if min(self.chunk_tokens, self.max_running, most) < 1:
            raise OutOfRange(
                f"A chunk of {self.chunk_tokens} tokens, {self.max_running} running requests, "
                f"max_new_tokens of {self.max_new_tokens}",
                "1 or more of each",
            )
        if self.policy not in POLICIES:
            raise OutOfRange(f"The policy {self.policy!r}", ", ".join(POLICIES))
        self.scheduler()

    def scheduler(self, cache: RadixCache | None = None) -> Scheduler:
        """An empty pool, and who admits to it."""
        watermark = self.watermark if self.policy == "vllm" else 0.0
        blocks = BlockManager(self.capacity_tokens, self.page_size, watermark, cache)
        if self.policy == "vllm":
            return Scheduler(blocks, self.chunk_tokens, self.max_running)
        return SGLangScheduler(blocks, self.chunk_tokens, self.max_running, self.max_new_tokens)


def simulate(
    engine: Engine,
    traffic: Traffic,
    *,
    leap: bool = True,
    overload: bool = False,
    observe: Callable[[int, Scheduler], None] | None = None,
) -> Results:
    """Serve `traffic` on `engine` and say how it went; the same input gives the same bytes.

    Time runs in steps, one after another:

    1. A step begins with the requests that arrived by then. In a closed loop the next one arrives
       when another ends.
    2. The scheduler says who decodes and whose prompts are prefilled: both in one step (vLLM), or
       a prefill alone, as long as there is one, before anybody decodes (SGLang). Each request that
       decodes takes a row for its newest token; a prompt, and what a preempted request had
       generated, takes all its rows at its admission. Where the traffic has block hashes, the
       leading blocks that are cached are neither computed nor held twice (`RadixCache`).
    3. The step lasts step(running, live), if anybody decodes, + prefilled tokens / prefill rate +
       the prefill's cast: `running` are the requests that decode and `live` their rows, this
       step's included. A fused batch of vLLM would share its weight reads and last a little less.
    4. At its end each request that decoded has a token; a completed prompt has its first token
       (or, after a preemption, its next), and decodes from the next step on. A request of G
       tokens so takes G - 1 decode steps. One with all its tokens leaves.

    Where nothing is prefilled, nothing changes but time until a request ends, the pool is full,
    or one arrives at an empty queue: `leap` crosses such steps at once, to the same results.
    A request longer than the pool is refused, reported, and does not hold up the rest. Raises
    `DoesNotFit` if the traffic asks for more prompt tokens/s than `engine` prefills, unless
    `overload`, and `OutOfRange` for more than 106 days. `observe(now, scheduler)` is called at
    each step that is looked at.
    """
    if not overload:
        require_servable(traffic, engine.prefill_tokens_per_s)
    return Run(engine, traffic).serve(leap, observe)


class Run:
    """A simulation under way: `serve` to its end, or step by step."""

    def __init__(self, engine: Engine, traffic: Traffic):
        self.engine, self.traffic = engine, traffic
        cache = RadixCache(traffic.block_tokens) if traffic.blocks else None
        self.scheduler = engine.scheduler(cache)
        self.blocks = self.scheduler.blocks
        self.step = Lines(engine.step, engine.capacity_tokens)
        self.cast = engine.prefill_cast and Lines(engine.prefill_cast, engine.capacity_tokens)
        self.prefill_ps = round(PS_PER_S / engine.prefill_tokens_per_s)
        self.log = Log(len(traffic))
        if not traffic.arrival_s[-1] < 100 * 86400:
            raise OutOfRange(f"Traffic of {traffic.arrival_s[-1] / 86400:.0f} days", "100 at most")
        self.arrivals = _integers(np.rint(traffic.arrival_s * PS_PER_S))
        self.prompts, self.outputs = map(_integers, (traffic.prompt_tokens, traffic.output_tokens))
        self.refused: list[Request] = []
        self.arrived = 0  # of the traffic
        self.in_flight = 0  # arrived, neither ended nor refused
        self.now = 0
        self.horizon: int | None = None  # a router's next request; else the next of the traffic
        self.fresh: list[Request] = []  # requests that have not decoded yet

    def serve(self, leap: bool, observe: Callable[[int, Scheduler], None] | None) -> Results:
        try:
            while self.arrive():
                self.one_step(leap, observe)
        except OverflowError:
            raise _too_long(self.traffic) from None
        return self.results()

    def results(self) -> Results:
        return Results(
            self.engine, self.traffic, self.arrivals, self.refused, self.scheduler, self.log
        )

    def one_step(self, leap: bool, observe: Callable[[int, Scheduler], None] | None) -> None:
        """One step, or several at once that only let time pass."""
        scheduler = self.scheduler
        before = len(scheduler.running), self.blocks.available
        admissions, preemptions = scheduler.admissions, scheduler.preemptions
        batch = scheduler.schedule(self.now)
        preempted = scheduler.preemptions > preemptions
        if preempted or scheduler.admissions > admissions:
            self.log.sample(self.now, scheduler, *before)
        if observe:
            observe(self.now, scheduler)
        # After a preemption the head of the queue may find room again.
        clear = leap and not batch.chunk and not preempted
        self.advance(batch, self.clear_steps() if clear else 1)
        self.finish(batch)

    def arrive(self) -> bool:
        """Queue what has arrived by now; False if nothing is left to do.

        A closed loop sends a request for each that ended. An idle server waits for the next one.
        """
        scheduler, limit, arrivals = self.scheduler, self.traffic.concurrency, self.arrivals
        while self.arrived < len(arrivals):
            if limit is not None:
                if self.in_flight >= limit:
                    break
                arrivals[self.arrived] = self.now
            elif arrivals[self.arrived] > self.now:
                if self.in_flight:
                    break
                self.now = arrivals[self.arrived]
                scheduler.idle()
            self.send(self.arrived)
        return self.in_flight > 0

    def send(self, id: int) -> None:
        """Request `id` arrives, at its time."""
        blocks = self.traffic.blocks[id] if self.traffic.blocks else ()
        request = Request(id, self.arrivals[id], self.prompts[id], self.outputs[id], blocks)
        self.arrived = id + 1
        if self.scheduler.add(request):
            self.in_flight += 1
        else:
            self.refused.append(request)

    def clear_steps(self) -> int:
        """How many decode steps, this one with them, only let time pass; at least 1."""
        running, live = self.blocks.decoding, self.blocks.live_tokens
        steps = 1 + self.blocks.steps_until_full(self.scheduler.steps_to_next_end())
        line = self.step.line(running, live)
        steps = min(steps, (line.last_live - live) // running + 1)
        if (until := self.next_arrival()) is None:
            return steps
        wait = until - self.now
        low, high = 1, steps  # up to the first step that ends at or after the arrival
        while low < high:
            middle = (low + high) // 2
            if line.span_ps(live, running, middle) >= wait:
                high = middle
            else:
                low = middle + 1
        return low

    def next_arrival(self) -> int | None:
        """When a request comes that may change the next steps.

        A blocked head of the queue stays blocked while others only grow, so that an arrival after
        it changes nothing.
        """
        if self.horizon is not None:
            return self.horizon
        if self.scheduler.waiting or self.arrived == len(self.arrivals):
            return None
        return None if self.traffic.concurrency else self.arrivals[self.arrived]

    def advance(self, batch: Batch, steps: int) -> None:
        """Let `steps` steps pass; one that prefills is alone."""
        span = batch.chunk * self.prefill_ps
        if self.cast and batch.chunk:
            span += self.cast_ps(batch)
        if batch.decode:
            running, live = self.blocks.decoding, self.blocks.live_tokens
            line = self.step.line(running, live)
            first = line.ps(live) + span
            span += line.span_ps(live, running, steps)
            self.log_gaps(running, first, line.slope_ps * running, steps)
            self.blocks.append(steps - 1)
            self.log.decoded(self.blocks, steps)
        self.now += span
        if batch.decode:
            self.scheduler.decoded_at = self.now

    def cast_ps(self, batch: Batch) -> int:
        """What a prefill pays for reading the pool; see `Engine`."""
        captured = self.engine.prefill_graphs and batch.chunk <= CAPTURED_TOKENS
        if captured or 0 < batch.prefix < GATHERED_TOKENS:
            rows = batch.chunk + batch.prefix
            return self.cast.line(1, rows).ps(rows)
        return 0

    def log_gaps(self, running: int, first: int, growth: int, steps: int) -> None:
        """Time between tokens over `steps` decode steps, of `first` ps and `growth` more each.

        A request that had its last token before `now` waited for prefills since.
        """
        log, now, stalled = self.log, self.now, self.now - self.scheduler.decoded_at
        fresh = [r.last for r in self.fresh if r.decoding] if self.fresh else []
        self.fresh.clear()
        old = running - len(fresh)
        if not (stalled and old) and (not fresh or min(fresh) == now):
            log.gaps(running, first, growth, steps)
            return
        if old:
            log.gaps(old, first + stalled, 0, 1)
        for last, count in Counter(fresh).items():
            log.gaps(count, first + now - last, 0, 1)
        if steps > 1:
            log.gaps(running, first + growth, growth, steps - 1)

    def finish(self, batch: Batch) -> None:
        """Tokens and departures at the end of a step."""
        scheduler, log, now = self.scheduler, self.log, self.now
        for request in batch.done:
            if request.first < 0:
                request.first = now
            else:
                log.gaps(1, now - request.last, 0, 1)
            request.last = now
        self.fresh += batch.done
        before = len(scheduler.running), self.blocks.available
        done = scheduler.postprocess(batch, now)
        for request in done:
            log.finish(request, now)
        if done:
            self.in_flight -= len(done)
            log.sample(now, scheduler, *before)


def _too_long(traffic: Traffic) -> OutOfRange:
    return OutOfRange(f"{traffic.name} takes more than 106 days to serve", "", "Cut it in parts")


def _integers(values: np.ndarray) -> array:
    """int64 values whose single elements are quick to read."""
    return array("q", values.astype(np.int64).tobytes())

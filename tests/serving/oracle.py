"""Slow serving engines, written from the docstrings alone: one step at a time, no shortcuts."""


class Job:
    def __init__(self, id, at, prompt, output, blocks=()):
        self.id, self.at, self.prompt, self.output, self.blocks = id, at, prompt, output, blocks
        self.tokens = []  # when each came
        self.held = self.computed = 0  # rows it sees, and those of them that are filled
        self.shared = []  # blocks that it reads in the cache
        self.admitted, self.kicks = None, 0

    @property
    def text(self):
        """Rows that a prefill has to make."""
        return self.prompt + len(self.tokens)


class Server:
    """What both engines share. Times are whole picoseconds; `step(running, live)` too."""

    def __init__(
        self, rows, closed, capacity, step, prefill, chunk, page, most, block=0, cast=None
    ):
        self.total, self.page, self.most = capacity // page, page, most
        self.step, self.prefill_ps, self.chunk, self.closed = step, prefill, chunk, closed
        self.block, self.cast = block, cast
        self.jobs = [Job(i, *row) for i, row in enumerate(rows)]
        self.todo, self.queue, self.prefilling, self.decoding = list(self.jobs), [], [], []
        self.gaps, self.refused, self.redone, self.now = [], [], 0, 0
        self.cache = {}  # block -> when it was last let go of, None while somebody runs with it
        self.clock = 0

    # The pool.

    def running(self):
        return self.prefilling + self.decoding

    def own(self, job):
        return job.held - len(job.shared) * self.block

    def used(self):
        """Pages that cannot be had: rows of who runs, and the blocks that they read."""
        pages = sum(-(-self.own(job) // self.page) for job in self.running())
        locked = {b for job in self.running() for b in job.shared}
        return pages + len(locked) * self.block // self.page

    def make_room(self):
        """Drop the blocks that nobody reads, longest unused first, while the pool overflows."""
        while True:
            locked = {b for job in self.running() for b in job.shared}
            pages = sum(-(-self.own(job) // self.page) for job in self.running())
            if pages + len(self.cache) * self.block // self.page <= self.total:
                return
            del self.cache[min(self.cache.keys() - locked, key=self.cache.get)]

    def let_go(self, job):
        """Its blocks stay; the end of the prefix counts as older than its beginning."""
        still = {b for other in self.running() if other is not job for b in other.shared}
        for b in reversed(job.shared):
            self.clock += 1
            if b not in still:
                self.cache[b] = self.clock
        job.shared, job.held, job.computed = [], 0, 0

    def kick(self, victim):
        self.redone += victim.computed - len(victim.shared) * self.block
        for group in (self.prefilling, self.decoding):
            if victim in group:
                group.remove(victim)
        self.let_go(victim)
        victim.kicks += 1

    # Prompts.

    def begin(self, job):
        """The queue's head gets its rows; what it finds in the cache is there already."""
        job.held = job.text
        if self.block:
            for b in job.blocks[: (job.prompt - 1) // self.block]:
                if b not in self.cache:
                    break
                job.shared.append(b)
            job.computed = len(job.shared) * self.block
        self.prefilling.append(job)

    def take_back(self, job):
        self.prefilling.remove(job)
        self.let_go(job)  # who looks for blocks makes them the newest

    def fill(self, may_begin):
        """(prompt tokens, rows before them, jobs whose prompts are complete)."""
        left, before, filled = self.chunk, 0, []
        partial = list(self.prefilling)
        while left:
            if not partial:
                if not self.queue or len(self.running()) >= self.most:
                    break
                job = self.queue[0]
                self.begin(job)
                if not may_begin(job, filled):
                    self.take_back(job)
                    break
                self.make_room()
                self.queue.pop(0)
                job.admitted = self.now if job.admitted is None else job.admitted
                partial = [job]
            job = partial[0]
            before += job.computed
            rows_now = min(left, job.held - job.computed)
            job.computed += rows_now
            left -= rows_now
            if job.computed == job.held:
                filled.append(partial.pop())
        return self.chunk - left, before, filled

    def token(self, jobs, filled=()):
        """Each of `jobs` has a token now; those whose prompts are filled decode from now on."""
        for job in filled:
            self.prefilling.remove(job)
            self.decoding.append(job)
            new = job.blocks[len(job.shared) :] if self.block else ()
            job.shared += new
            self.cache.update({b: None for b in new if b not in self.cache})
        for job in [*jobs, *filled]:
            job.computed = job.held
            self.gaps += [self.now - job.tokens[-1]] if job.tokens else []
            job.tokens.append(self.now)
        left = False
        for job in self.leaving():
            self.decoding.remove(job)
            self.let_go(job)
            left = True
        return left

    def leaving(self):
        """In the order in which the lab lets them go: by end, then by id (all end now)."""
        return sorted((j for j in self.decoding if len(j.tokens) == j.output), key=lambda j: j.id)

    def prefill_time(self, chunk, before):
        time = chunk * self.prefill_ps
        if self.cast and chunk:
            pool, graphs = self.cast
            if (graphs and chunk <= 8192) or 0 < before < 8192:
                time += pool(chunk + before)
        return time

    # The loop.

    def serve(self):
        while self.todo or self.queue or self.running():
            while self.todo and (
                len(self.queue + self.running()) < self.closed
                if self.closed
                else self.todo[0].at <= self.now
            ):
                job = self.todo.pop(0)
                job.at = self.now if self.closed else job.at
                (self.queue if self.fits(job) else self.refused).append(job)
            if not self.queue + self.running():
                self.now = self.todo[0].at if self.todo and not self.closed else self.now
                self.rest()
                continue
            self.one_step()
        served = [job for job in self.jobs if job not in self.refused]
        assert all(len(job.tokens) == job.output for job in served)
        times = [(j.id, j.at, j.admitted, j.tokens[0], j.tokens[-1], j.kicks) for j in served]
        return times, sorted(self.gaps), self.redone, [job.id for job in self.refused]

    def rest(self):
        pass


class VLLM(Server):
    def __init__(self, *args, watermark=0.01, **options):
        super().__init__(*args, **options)
        self.watermark = watermark

    def fits(self, job):
        return -(-(job.prompt + job.output - 1) // self.page) <= self.total

    def one_step(self):
        kicked, decoding = False, list(self.decoding)
        for job in decoding:  # the oldest grows first; the newest pays
            if job not in self.decoding:
                break
            job.held += 1
            while self.used() > self.total:
                kicked = True
                victim = (self.prefilling or self.decoding)[-1]  # prompts are the newest
                self.kick(victim)
                self.queue.insert(0, victim)
                if victim is job:
                    break
        self.make_room()
        step = self.decode_time()
        decoders = list(self.decoding)
        chunk, before, filled = (0, 0, []) if kicked else self.fill(self.may_begin)
        self.now += step + self.prefill_time(chunk, before)
        self.token(decoders, filled)

    def decode_time(self):
        live = sum(job.held for job in self.decoding)
        return self.step(len(self.decoding), live) if self.decoding else 0

    def may_begin(self, job, filled):
        alone = self.running() == [job]
        return self.used() + (0 if alone else int(self.watermark * self.total)) <= self.total


class SGLang(Server):
    """Ratios in billionths: 0.7 at first, 0.602 / 600 less per decode step, 0.098 at least."""

    def __init__(self, *args, max_new=None, **options):
        super().__init__(*args, **options)
        self.max_new, self.ratio, self.full = max_new, 700_000_000, False

    def wish(self, job):
        return max(job.output, self.max_new or 0)

    def fits(self, job):
        return job.prompt + self.wish(job) + self.page < self.total * self.page

    def rest(self):
        self.ratio, self.full = 700_000_000, False

    def may_begin(self, job, filled):
        if self.full:
            return False
        wanted = min(self.wish(job) - len(job.tokens), 4096) + self.page
        promised = sum(min(self.wish(other), 4096) + self.page for other in filled)
        coming = sum(min(self.wish(o) - len(o.tokens), 4096) for o in self.decoding)
        # The rows of the newcomer are in `used` by whole pages, in SGLang's sum by the row.
        own = self.own(job)
        over = -(-own // self.page) * self.page - own
        left = (self.total - self.used()) * self.page + over - wanted - promised
        ok = left * 10**9 > self.ratio * coming
        self.full = not ok
        return ok

    def one_step(self):
        if self.queue and len(self.running()) >= self.most:
            self.full = True
        if self.full and not self.prefilling:
            chunk = 0
        else:
            chunk, before, filled = self.fill(self.may_begin)
            if self.queue and len(self.running()) >= self.most and chunk < self.chunk:
                self.full = True
        if chunk:
            self.now += self.prefill_time(chunk, before)
            if self.token([], filled):
                self.full = False
            return
        retracted = False
        while True:
            for job in self.decoding:
                job.held += 1
            if self.used() <= self.total:
                break
            for job in self.decoding:
                job.held -= 1
            retracted = True
            order = enumerate(self.decoding)
            _, victim = max(order, key=lambda p: (-len(p[1].tokens), p[1].prompt, p[0]))
            self.kick(victim)
            self.queue.append(victim)
        self.make_room()
        if retracted:
            made = sum(len(job.tokens) for job in self.decoding)
            wished = sum(map(self.wish, self.decoding))
            ratio = (made + 20 * len(self.decoding)) * 10**9 // (wished + 1)
            self.ratio, self.full = min(10**9, ratio), False
        else:
            self.ratio = max(98_000_000, self.ratio - 1_003_333)
        self.now += self.step(len(self.decoding), sum(job.held for job in self.decoding))
        if self.token(list(self.decoding)):
            self.full = False

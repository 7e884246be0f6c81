"""A slow serving engine, written from the docstrings alone: one step at a time, no shortcuts."""


class Job:
    def __init__(self, id, at, prompt, output):
        self.id, self.at, self.prompt, self.output = id, at, prompt, output
        self.tokens = []  # when each came
        self.held = self.computed = 0  # pool rows, and those of them that are filled
        self.admitted, self.kicks = None, 0

    @property
    def text(self):
        """Rows that a prefill has to make."""
        return self.prompt + len(self.tokens)


def serve(rows, closed, capacity, step_fs, prefill_fs, chunk, page=1, most=256, watermark=0.01):
    """Times of each job, gaps between tokens, recomputed rows, refused ids.

    `rows` are (arrival in fs, prompt, output); `step_fs(running, live)` is whole femtoseconds.
    """
    total = capacity // page
    jobs = [Job(i, *row) for i, row in enumerate(rows)]
    todo, queue, prefilling, decoding = list(jobs), [], [], []
    gaps, refused, redone, now = [], [], 0, 0

    def used():
        return sum(-(-job.held // page) for job in prefilling + decoding)

    def kick():
        nonlocal redone
        group = prefilling or decoding  # prompts are the newest
        victim = group.pop()
        redone += victim.computed
        victim.held = victim.computed = 0
        victim.kicks += 1
        queue.insert(0, victim)
        return victim

    while todo or queue or prefilling or decoding:
        while todo and (
            len(queue + prefilling + decoding) < closed if closed else todo[0].at <= now
        ):
            job = todo.pop(0)
            job.at = now if closed else job.at
            if -(-(job.prompt + job.output - 1) // page) > total:
                refused.append(job.id)
            else:
                queue.append(job)
        if not queue + prefilling + decoding:
            now = todo[0].at if todo and not closed else now
            continue
        kicked = False
        for job in list(decoding):  # the oldest grows first; the newest pays
            if job not in decoding:
                break
            job.held += 1
            while used() > total:
                kicked = True
                if kick() is job:
                    break
        step = step_fs(len(decoding), sum(job.held for job in decoding)) if decoding else 0
        left, filled = 0 if kicked else chunk, []
        while left:
            if not prefilling:
                alone = not decoding and not filled
                spare = 0 if alone else int(watermark * total)
                busy = used() + sum(-(-job.held // page) for job in filled)
                room = queue and busy + spare + -(-queue[0].text // page) <= total
                if not room or len(decoding) + len(filled) >= most:
                    break
                job = queue.pop(0)
                job.held = job.text
                job.admitted = now if job.admitted is None else job.admitted
                prefilling.append(job)
            job = prefilling[0]
            rows_now = min(left, job.held - job.computed)
            job.computed += rows_now
            left -= rows_now
            if job.computed == job.held:
                filled.append(prefilling.pop(0))
        now += step + (0 if kicked else chunk - left) * prefill_fs
        for job in decoding:
            job.computed = job.held
        decoding += filled
        for job in decoding:
            gaps += [now - job.tokens[-1]] if job.tokens else []
            job.tokens.append(now)
        decoding = [job for job in decoding if len(job.tokens) < job.output]
    served = [job for job in jobs if job.id not in refused]
    assert all(len(job.tokens) == job.output for job in served)
    times = [(j.id, j.at, j.admitted, j.tokens[0], j.tokens[-1], j.kicks) for j in served]
    return times, sorted(gaps), redone, refused

"""One engine, step by step, as plainly as can be: what `headrace_lab.simulate` must agree with.

Every engine does both, there is one of it, and its node has no store.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from headrace_engine.step_time import StepTime, pairs_of

BLOCK = 512


@dataclass
class Request:
    """A request, and what became of it."""

    arrival_s: float
    prompt: int
    output: int
    chain: list[int]
    first_s: float = -1.0
    end_s: float = -1.0
    emitted: int = 0
    ready: int = 0
    need: int = 0
    plain: int = 0
    held: int = 0
    preempted: int = 0


class Pool:
    """Blocks with references, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.plain = capacity, 0
        self.refs: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def room(self) -> int:
        return self.capacity - len(self.refs) - self.plain + len(self.idle)

    def take(self, fresh: int) -> None:
        while len(self.refs) + self.plain + fresh > self.capacity:
            key, _ = self.idle.popitem(last=False)
            del self.refs[key]
        self.plain += fresh

    def use(self, key: int) -> None:
        self.idle.pop(key, None)
        self.refs[key] += 1

    def release(self, key: int) -> None:
        self.refs[key] -= 1
        if not self.refs[key]:
            self.idle[key] = None


def play(
    requests: list[Request], steps: StepTime, kv_blocks: int, step_tokens: int, most: int
) -> None:
    """Serve them all, in place."""
    pool, now = Pool(kv_blocks), 0.0
    waiting: deque[Request] = deque()
    rows: list[Request] = []
    prompts: list[Request] = []
    coming = deque(sorted(requests, key=lambda r: r.arrival_s))

    def free(r: Request) -> None:
        pool.plain -= r.plain
        for key in reversed(r.chain[: r.held]):
            pool.release(key)
        r.plain = r.held = 0

    def begin(r: Request) -> bool:
        r.need, matched = r.prompt + r.emitted, 0
        useful = min(len(r.chain), (r.need - 1) // BLOCK)
        while matched < useful and r.chain[matched] in pool.refs:
            matched += 1
        fresh = -(-(r.need + 1) // BLOCK) - matched
        unused = sum(key in pool.idle for key in r.chain[:matched])
        if pool.room() - fresh - unused < 0:
            return False
        for key in r.chain[:matched]:
            pool.use(key)
        pool.take(fresh)
        r.held, r.plain, r.ready = matched, fresh, matched * BLOCK
        return True

    def growth() -> int:
        return sum(max(0, -(-(r.prompt + r.emitted + 1) // BLOCK) - r.held - r.plain) for r in rows)

    while coming or waiting or rows or prompts:
        if not (waiting or rows or prompts):
            now = max(now, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now:
            waiting.append(coming.popleft())
        preempted = False
        while rows and growth() > pool.room():
            r = rows.pop()
            free(r)
            r.preempted, preempted = r.preempted + 1, True
            waiting.appendleft(r)
        budget, chunks = step_tokens - len(rows), []
        for r in prompts:
            chunks.append(min(budget - sum(chunks), r.need - r.ready))
        if not preempted or not (rows or prompts):
            while waiting and len(rows) + len(prompts) < most and sum(chunks) < budget:
                if not begin(waiting[0]):
                    break
                r = waiting.popleft()
                prompts.append(r)
                chunks.append(min(budget - sum(chunks), r.need - r.ready))
        pairs = sum(
            pairs_of(r.ready, r.ready + size) for r, size in zip(prompts, chunks, strict=True)
        )
        context = sum(r.prompt + r.emitted for r in rows)
        now += steps.seconds(sum(chunks), len(rows), 0, context, pairs)
        for r in rows:
            r.emitted += 1
            more = -(-(r.prompt + r.emitted) // BLOCK) - r.held - r.plain
            if more > 0:
                pool.take(more)
                r.plain += more
        done = [r for r in rows if r.emitted >= r.output]
        rows = [r for r in rows if r.emitted < r.output]
        for r in done:
            free(r)
            r.end_s = now
        left = []
        for r, size in zip(prompts, chunks, strict=True):
            r.ready += size
            full = max(r.held, min(len(r.chain), r.ready // BLOCK))
            for key in r.chain[r.held : full]:
                pool.plain -= 1
                r.plain -= 1
                if key in pool.refs:
                    pool.use(key)
                else:
                    pool.refs[key] = 1
            r.held = full
            if r.ready < r.need:
                left.append(r)
                continue
            r.emitted += 1
            if r.first_s < 0:
                r.first_s = now
            if r.emitted >= r.output:
                free(r)
                r.end_s = now
            else:
                rows.append(r)
        prompts = left

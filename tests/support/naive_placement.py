"""Placement by pricing every pair, one by one, in plain Python: what `place` must equal."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.pair_search import ELSEWHERE, WITHIN
from headrace.router.plan import RouterSettings
from headrace_engine.step_time import StepTime, pairs_of
from headrace_kvstore.lookup.availability import MEDIA, AvailableRun


@dataclass
class Engine:
    """One engine, as the view is told of it."""

    name: str
    role: str
    node: int
    step: StepTime
    step_tokens: int = 2048
    queued_tokens: int = 0
    queued_pairs: int = 0
    prompts: int = 0
    running: int = 0
    context: int = 0
    free_blocks: int = -1
    drift: float = 0.0
    age_s: float = 0.0
    call_s: float = 0.02
    handoff_s: float = 0.005
    held: int = 0
    adapter_s: float = 0.0
    reload_s: float = 0.0
    usable: bool = True


@dataclass
class Node:
    """A node: runs that its store can supply; (fixed_s, byte_s) by medium."""

    runs: list[AvailableRun] = field(default_factory=list)
    loads: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Cluster:
    engines: list[Engine]
    nodes: list[Node]
    elsewhere: tuple[float, float] = (0.005, 1e-9)
    within: tuple[float, float] = (0.005, 1e-9)
    block_tokens: int = 16
    token_bytes: float = 1000.0
    settings: RouterSettings = field(default_factory=RouterSettings)
    now_s: float = 100.0

    def view(self) -> ClusterView:
        """Return the view; holder `i` is the cache of engine `i`."""
        view = ClusterView(self.block_tokens, self.token_bytes, self.settings)
        for at, node in enumerate(self.nodes):
            view.node(str(at))
            for medium, fit in node.loads.items():
                view.set_load(at, medium, *fit)
        view.set_fit(ELSEWHERE, *self.elsewhere, 0.1)
        view.set_fit(WITHIN, *self.within, 0.1)
        for at, e in enumerate(self.engines):
            row = view.add(e.name, e.role, e.node, hbm=at, step_tokens=e.step_tokens)  # type: ignore[arg-type]
            view.set_steps(row, e.step)
            for name in ("prompts", "running", "context", "free_blocks", "drift"):
                view.engines[row][name] = getattr(e, name)
            for name in ("call_s", "handoff_s"):
                view.engines[row][name] = getattr(e, name)
            view.set_queue(row, e.queued_tokens, e.queued_pairs, self.now_s - e.age_s)
            if not e.usable:
                view.engines[row][e.role] = False
        return view

    def held(self) -> list[int]:
        return [engine.held for engine in self.engines]

    def adapter_s(self) -> list[list[float]]:
        return [[e.adapter_s for e in self.engines], [e.reload_s for e in self.engines]]


@dataclass(frozen=True)
class Priced:
    """One choice."""

    prefill: str
    decode: str
    total_s: float
    ttft_s: float
    broken: int
    """0, 1 if it is only late, 2 if others lose their room or their steps."""


class Naive:
    """Prices one prompt on a cluster."""

    def __init__(self, cluster: Cluster, tokens: int) -> None:
        self.c, self.n = cluster, tokens

    def wait_s(self, e: Engine) -> float:
        queue_s = e.step.prefill_s(
            e.queued_tokens, e.queued_pairs,
            step_tokens=e.step_tokens, rows=e.running, context=e.context,
        )  # fmt: skip
        left = max(0.0, queue_s - e.age_s)
        spread = math.sqrt(e.drift * e.age_s)
        if not spread:
            return left
        z = left / spread
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return left * (1 + math.erf(z / math.sqrt(2))) / 2 + spread * density

    def cached(self, e: Engine) -> int:
        return min(e.held, max(0, self.n - 1) // self.c.block_tokens) * self.c.block_tokens

    def work(self, e: Engine) -> tuple[int, float, float, float]:
        """(tokens, computing, loading, waiting for what is pulled)"""
        loads = {m: (0.005, 1e-9) for m in MEDIA[:2]} | self.c.nodes[e.node].loads
        block, cached = self.c.block_tokens, self.cached(e)
        runs = self.c.nodes[e.node].runs
        useful = min(sum(r[1] for r in runs), max(0, self.n - 1)) // block * block
        options: list[tuple[dict[str, int], float]] = [({}, 0.0)]
        taken: dict[str, int] = {}
        wait = 0.0
        end = 0
        for medium, length, pull in runs:
            begin, end = max(end, cached), end + length
            new = min(end, useful) - begin
            if new <= 0:
                continue
            taken = {**taken, medium: taken.get(medium, 0) + new}
            wait += pull * new / length
            options.append((taken, wait))
            if set(taken) == {MEDIA[0]}:
                options = options[-1:]

        def priced(option: tuple[dict[str, int], float]) -> tuple[int, float, float, float]:
            tokens = max(1, self.n - cached - sum(option[0].values()))
            read: dict[str, int] = {}
            for medium, number in option[0].items():
                source = medium if medium == MEDIA[1] else MEDIA[0]
                read[source] = read.get(source, 0) + number
            load = sum(loads[m][0] + loads[m][1] * t * self.c.token_bytes for m, t in read.items())
            return tokens, self.prefill_s(e, tokens), load, option[1]

        return min(
            (priced(option) for option in reversed(options)),
            key=lambda found: found[3] + max(found[1], found[2]),
        )

    def prefill_s(self, e: Engine, tokens: int) -> float:
        last = max(self.n, tokens)
        return e.step.prefill_s(
            tokens, pairs_of(last - tokens, last),
            step_tokens=e.step_tokens, rows=e.running, context=e.context,
        )  # fmt: skip

    def all(self) -> list[Priced]:
        c, s = self.c, self.c.settings
        itl, slo = s.itl_target_s or math.inf, s.ttft_target_s or math.inf
        prefills = [e for e in c.engines if e.role == "prefill" and e.usable]
        found = []
        for d in (e for e in c.engines if e.role == "decode" and e.usable):
            r = d.running
            idle = d.step.seconds(0, r, 0, d.context)
            last = self.prefill_s(d, 1) + d.adapter_s
            pace = max(idle, itl) if itl < math.inf else idle
            more = r * max(0.0, last - pace)
            cached, queue = self.cached(d), self.wait_s(d)
            need = math.ceil(self.n / c.block_tokens) - cached // c.block_tokens
            full = 0 <= d.free_blocks < need

            tokens, compute, load, pull = self.work(d)
            took = max(compute, load) + d.adapter_s
            steps = math.ceil(tokens / d.step_tokens)
            stall = r * max(0.0, took - steps * pace)
            behind = d.prompts * max(0.0, took - idle) + d.reload_s
            last_behind = d.prompts * max(0.0, last - idle) + d.reload_s
            step = self.prefill_s(d, min(tokens, d.step_tokens)) + d.adapter_s
            slow = r > 0 and step > itl
            ttft = queue + pull + took
            broken = 2 if full or slow else int(ttft > slo)
            found.append(Priced("", d.name, ttft + stall + behind, ttft, broken))

            for p in prefills:
                _, compute, load, pull = self.work(p)
                own = max(compute, load) + p.adapter_s
                behind = p.prompts * max(0.0, own - p.step.seconds(0, p.running, 0, p.context))
                behind += p.reload_s
                fixed, byte = c.within if p.node == d.node else c.elsewhere
                size = (
                    math.ceil(self.n / c.block_tokens) * c.block_tokens - cached
                ) * c.token_bytes
                arrival = p.call_s + self.wait_s(p) + pull + own
                arrival += (fixed + byte * size if size else 0.0) + d.handoff_s
                ttft = max(arrival, queue) + last
                total = ttft + more + behind + last_behind
                broken = 2 if full or (r > 0 and last > itl) else int(ttft > slo)
                found.append(Priced(p.name, d.name, total, ttft, broken))
        return found

    def best(self) -> Priced:
        """Of those that break least."""
        return min(self.all(), key=lambda each: (each.broken, each.total_s))

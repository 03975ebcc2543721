"""Data that a router has when it places a request: delayed reports, its own counts, the caches.

Each engine reports at an interval, and a report arrives after a delay. The router also knows the
requests that it sent after the report was made (`since_*`). It relays all requests, so it has exact
counts of the ones that have not ended (`sent_*`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace_lab.simulate.hardware import Hardware, StepCurve
from headrace_lab.simulate.state import State

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class EngineReports:
    """All engines at one moment; arrays [engines], prefill engines first.

    Attributes:
        queue_tokens, queue_pairs: tokens and pairs to compute, including the current step's.
        prompts: prompts that wait to be computed, or are being computed.
        waiting: requests that are not admitted yet.
        running, context: requests that decode, and their tokens.
        used: KV blocks that requests use.
    """

    at_s: float
    queue_tokens: Ints
    queue_pairs: Floats
    prompts: Ints
    waiting: Ints
    running: Ints
    context: Ints
    used: Ints
    alive: NDArray[np.int8]


def read_reports(s: State) -> EngineReports:
    eng, kv, engines = s.eng, s.kv, len(s.eng)
    return EngineReports(
        at_s=float(s.now_s[0]),
        queue_tokens=eng["queue_tokens"].copy(),
        queue_pairs=eng["queue_pairs"].copy(),
        prompts=eng["waiting"] + eng["chunks"],
        waiting=eng["waiting"].copy(),
        running=eng["running"] + eng["joins"],
        context=eng["context"].copy(),
        used=(kv.of["held"] - kv.of["idle"] + kv.of["plain"])[:engines],
        alive=eng["alive"] & eng["open"],
    )


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A request to place.

    Attributes:
        number: how many requests were placed before.
        prompt: tokens whose KV it needs.
        output: tokens of its answer; a policy that reads it knows more than a real router can.
        match: leading blocks of the prompt in the KV cache of each engine, int32 [engines].
        store: the larger of `match` and the leading blocks in the store of each engine's node,
            int32 [engines].
        stores: leading blocks in each node's store alone, int32 [nodes].
        affinity: a number for the prompt's first block.
    """

    number: int
    prompt: int
    output: int
    blocks: int
    affinity: int
    match: NDArray[np.int32]
    store: NDArray[np.int32]
    stores: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A placement: the engine that computes the prompt, or None for `decode`, and the engine that
    decodes. Engines are numbered with the prefill engines first."""

    prefill: int | None
    decode: int


@dataclass(slots=True)
class ClusterState:
    """The router's view. `sent_*` and `since_*` are [engines].

    Attributes:
        curves: step times of prefill and decode engines.
        prefills: number of prefill engines; 0 if every engine does both.
        node: node of each engine.
        sent_requests, sent_tokens, sent_blocks: requests under way, their prompt tokens to compute,
            and the blocks of their prompts on decode engines.
        since_tokens, since_pairs, since_requests: the same for requests that were sent since the
            report.
    """

    hardware: Hardware
    curves: tuple[StepCurve, StepCurve]
    prefills: int
    node: NDArray[np.int32]
    now_s: float
    report: EngineReports
    sent_requests: Ints
    sent_tokens: Ints
    sent_blocks: Ints
    since_tokens: Ints
    since_pairs: Floats
    since_requests: Ints

    @property
    def alive(self) -> NDArray[np.bool_]:
        return self.report.alive.astype(bool)


@dataclass(slots=True)
class ReportQueue:
    """Reports on their way, and the requests sent since the last arrived report was made."""

    delay_s: float
    _in_transit: deque[EngineReports] = field(default_factory=deque)
    _sent: deque[tuple[float, int, int, int, float]] = field(default_factory=deque)

    def add(self, report: EngineReports) -> None:
        self._in_transit.append(report)

    def record_sent(self, at_s: float, p: int, d: int, tokens: int, pairs: float) -> None:
        """Record the work of a placement: tokens and pairs on p, or on d if p is below 0."""
        self._sent.append((at_s, p, d, tokens, pairs))

    def deliver(self, cluster: ClusterState, now_s: float) -> None:
        """Bring a view up to date."""
        newest = None
        while self._in_transit and self._in_transit[0].at_s + self.delay_s <= now_s:
            newest = self._in_transit.popleft()
        cluster.now_s = now_s
        if newest is None:
            return
        cluster.report = newest
        while self._sent and self._sent[0][0] < newest.at_s:
            self._sent.popleft()
        for array in (cluster.since_tokens, cluster.since_requests):
            array[:] = 0
        cluster.since_pairs[:] = 0.0
        for _, p, d, tokens, pairs in self._sent:
            record_sent(cluster, p, d, tokens, pairs)


def record_sent(cluster: ClusterState, p: int, d: int, tokens: int, pairs: float) -> None:
    """Add a placement to the counts since the report."""
    e = p if p >= 0 else d
    cluster.since_tokens[e] += tokens
    cluster.since_pairs[e] += pairs
    cluster.since_requests[d] += 1

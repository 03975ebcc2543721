"""Headrace's placement in the simulator: the gateway's own placement code over a simulated view.

The view is filled as in a gateway: each engine's last report, plus the requests placed since then.
For decode engines, the gateway counts the blocks and requests that it sent and that have not ended,
since it relays them.
"""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
from numpy.typing import NDArray

from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.place import place_engines
from headrace.router.placement.policies import make_policy
from headrace.router.placement.pricing import queue_s
from headrace.router.placement.request import PlacementRequest
from headrace.router.plan import RouterSettings
from headrace_kvstore.lookup.availability import DRAM, AvailableRun
from headrace_kvstore.numba_jit import jit
from headrace_lab.simulate.cluster_state import (
    ClusterState,
    EnginePair,
    EngineReports,
    PromptRequest,
    ReportQueue,
)
from headrace_lab.simulate.hardware import Engine


class HeadracePolicy:
    """Policy of one gateway for one run; a second run needs a new object."""

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self._policy = make_policy(self.settings.placement)
        self._view: ClusterView | None = None
        self._report: EngineReports | None = None
        self._placed: deque[tuple[float, int]] = deque()

    def __call__(self, cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
        view = self._refresh(cluster)
        prefill, decode = place_engines(
            view,
            PlacementRequest(
                request_id="",
                prompt_tokens=request.prompt,
                now_s=cluster.now_s,
                held=request.match,
                available_runs=_available_runs(cluster, request),
                affinity=request.affinity,
            ),
            policy=self._policy,
        )
        computes = decode if prefill < 0 else prefill
        there = request.match[computes], request.stores[cluster.node[computes]]
        size = cluster.hardware.block_tokens
        left = request.prompt - min(max(there), (request.prompt - 1) // size) * size
        pairs = 0.5 * left * (2 * request.prompt - left + 1)
        view.reserve(computes, left, pairs, cluster.now_s)
        view.engines["prompts"][computes] += 1
        self._placed.append((cluster.now_s, computes))
        return EnginePair(prefill if prefill >= 0 else None, decode)

    def current_view(
        self, cluster: ClusterState, reports: ReportQueue, now_s: float
    ) -> ClusterView:
        """Return the current view, read only."""
        reports.deliver(cluster, now_s)
        return self._refresh(cluster)

    def _refresh(self, cluster: ClusterState) -> ClusterView:
        view = self._view or self._new_view(cluster)
        if cluster.report is not self._report:
            self._write_report(view, cluster)
        self._write_counts(view, cluster)
        return view

    def _new_view(self, cluster: ClusterState) -> ClusterView:
        hardware, engines = cluster.hardware, len(cluster.node)
        view = ClusterView(hardware.block_tokens, hardware.kv_bytes_per_token, self.settings)
        for node in range(int(cluster.node.max()) + 1):
            view.set_load(
                view.node(str(node)), DRAM, hardware.store_fixed_s, 1.0 / hardware.store_bytes_s
            )
        fixed_s = hardware.transfer_fixed_s
        view.set_fit(0, fixed_s, 1.0 / hardware.link_bytes_s, 0.1)
        view.set_fit(1, fixed_s, 1.0 / hardware.inside_bytes_s, 0.1)
        for e in range(engines):
            of_prefill = e < cluster.prefills
            side: Engine = hardware.prefill if of_prefill else hardware.decode
            row = view.add(
                str(e),
                "prefill" if of_prefill else "decode",
                int(cluster.node[e]),
                hbm=e,
                step_tokens=side.step_tokens,
            )
            view.set_steps(row, side.steps)
        view.engines["cold"] = False
        view.engines["call_s"] = 0.0
        view.engines["handoff_s"] = hardware.handoff_s
        self._view = view
        return view

    def _write_report(self, view: ClusterView, cluster: ClusterState) -> None:
        """Write the last report into the view, plus the placements since it was made."""
        self._report = report = cluster.report
        engines, split, alive = view.engines, cluster.prefills, cluster.alive
        engines["queued_tokens"] = report.queue_tokens + cluster.since_tokens
        engines["queued_pairs"] = np.maximum(0.0, report.queue_pairs + cluster.since_pairs)
        engines["prompts"] = report.prompts + self._since(report.at_s)
        engines["at_s"] = engines["reported_s"] = report.at_s
        engines["prefill"][:split] = alive[:split]
        # Without any live decode engine, requests are sent to dead ones, and placed again later.
        engines["decode"][split:] = alive[split:] if alive[split:].any() else True
        _fill_queues(engines, view.curves, view.padded)

    def _since(self, at_s: float) -> NDArray[np.int64]:
        """Return the number of prompts placed on each engine since `at_s`."""
        while self._placed and self._placed[0][0] < at_s:
            self._placed.popleft()
        assert self._view is not None
        return np.bincount([e for _, e in self._placed], minlength=len(self._view.engines))

    def _write_counts(self, view: ClusterView, cluster: ClusterState) -> None:
        """Write the gateway's own counts of the decode engines into the view."""
        engines, split = view.engines, cluster.prefills
        engines["running"][split:] = cluster.sent_requests[split:]
        engines["context"][split:] = cluster.sent_blocks[split:] * cluster.hardware.block_tokens
        blocks = cluster.hardware.decode.kv_blocks
        engines["free_blocks"][split:] = np.maximum(0, blocks - cluster.sent_blocks[split:])


def _available_runs(cluster: ClusterState, request: PromptRequest) -> list[list[AvailableRun]]:
    """Return the leading tokens that each node's store has."""
    block = cluster.hardware.block_tokens
    return [[AvailableRun(DRAM, n * block, 0.0)] if n else [] for n in request.stores.tolist()]


@jit()
def _fill_queues(engines: np.ndarray, curves: np.ndarray, padded: np.ndarray) -> None:
    for i in range(len(engines)):
        engines[i].queue_s = 0.0
        if engines[i].queued_tokens > 0:
            engines[i].queue_s = queue_s(engines[i], curves, padded, i)

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

from headrace.router.engines import queue_s
from headrace.router.place import PlaceRequest, where
from headrace.router.plan import RouterSettings
from headrace.router.view import View
from headrace.simulate.hardware import Engine
from headrace.simulate.sight import Ask, Choice, Report, Reports, Sight
from headrace_kvstore.compiled import jit
from headrace_kvstore.supply import DRAM


class Headrace:
    """Policy of one gateway for one run; a second run needs a new object."""

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self._view: View | None = None
        self._report: Report | None = None
        self._placed: deque[tuple[float, int]] = deque()

    def __call__(self, sight: Sight, ask: Ask, rng: Random) -> Choice:
        view = self._now(sight)
        held = np.concatenate([ask.match, ask.stores])
        prefill, decode = where(
            view,
            PlaceRequest(
                request_id="",
                prompt_tokens=ask.prompt,
                now_s=sight.now_s,
                held=held,
                affinity=ask.affinity,
            ),
        )
        computes = decode if prefill < 0 else prefill
        there = ask.match[computes], ask.stores[sight.node[computes]]
        size = sight.hardware.block_tokens
        left = ask.prompt - min(max(there), (ask.prompt - 1) // size) * size
        pairs = 0.5 * left * (2 * ask.prompt - left + 1)
        view.reserve(computes, left, pairs, sight.now_s)
        view.engines["prompts"][computes] += 1
        self._placed.append((sight.now_s, computes))
        return Choice(prefill if prefill >= 0 else None, decode)

    def seen(self, sight: Sight, reports: Reports, now_s: float) -> View:
        """Return the current view, read only."""
        reports.arrive(sight, now_s)
        return self._now(sight)

    def _now(self, sight: Sight) -> View:
        view = self._view or self._new_view(sight)
        if sight.report is not self._report:
            self._learn(view, sight)
        self._books(view, sight)
        return view

    def _new_view(self, sight: Sight) -> View:
        hardware, engines = sight.hardware, len(sight.node)
        view = View(hardware.block_tokens, hardware.kv_bytes_per_token, self.settings)
        for node in range(int(sight.node.max()) + 1):
            holder = engines + node if hardware.store_blocks else -1
            view.node(str(node), dram=holder, store=holder)
            view.set_load(node, DRAM, hardware.store_fixed_s, 1.0 / hardware.store_bytes_s)
        fixed_s = hardware.transfer_fixed_s
        view.set_fit(0, fixed_s, 1.0 / hardware.link_bytes_s, 0.1)
        view.set_fit(1, fixed_s, 1.0 / hardware.inside_bytes_s, 0.1)
        for e in range(engines):
            of_prefill = e < sight.prefills
            side: Engine = hardware.prefill if of_prefill else hardware.decode
            row = view.add(
                str(e),
                "prefill" if of_prefill else "decode",
                int(sight.node[e]),
                hbm=e,
                step_tokens=side.step_tokens,
            )
            view.set_steps(row, side.steps)
        view.engines["cold"] = False
        view.engines["call_s"] = 0.0
        view.engines["handoff_s"] = hardware.handoff_s
        view.engines["share"][sight.prefills :] = hardware.lost_share
        self._view = view
        return view

    def _learn(self, view: View, sight: Sight) -> None:
        """Write the last report into the view, plus the placements since it was made."""
        self._report = report = sight.report
        engines, split, alive = view.engines, sight.prefills, sight.alive
        engines["queued_tokens"] = report.queue_tokens + sight.since_tokens
        engines["queued_pairs"] = np.maximum(0.0, report.queue_pairs + sight.since_pairs)
        engines["prompts"] = report.prompts + self._since(report.at_s)
        engines["at_s"] = engines["heard_s"] = report.at_s
        engines["prefill"][:split] = alive[:split]
        engines["decode"][split:] = alive[split:]
        _fill_queues(engines, view.curves, view.padded)

    def _since(self, at_s: float) -> NDArray[np.int64]:
        """Return the number of prompts placed on each engine since `at_s`."""
        while self._placed and self._placed[0][0] < at_s:
            self._placed.popleft()
        assert self._view is not None
        return np.bincount([e for _, e in self._placed], minlength=len(self._view.engines))

    def _books(self, view: View, sight: Sight) -> None:
        """Write the gateway's own counts of the decode engines into the view."""
        engines, split = view.engines, sight.prefills
        engines["running"][split:] = sight.sent_requests[split:]
        engines["context"][split:] = sight.sent_blocks[split:] * sight.hardware.block_tokens
        blocks = sight.hardware.decode.kv_blocks
        engines["free_blocks"][split:] = np.maximum(0, blocks - sight.sent_blocks[split:])


@jit()
def _fill_queues(engines: np.ndarray, curves: np.ndarray, padded: np.ndarray) -> None:
    for i in range(len(engines)):
        engines[i].queue_s = 0.0
        if engines[i].queued_tokens > 0:
            engines[i].queue_s = queue_s(engines[i], curves, padded, i)

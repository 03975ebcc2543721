"""View of a decode replica that makes its own plans.

It contains the replica's own engine, and the prefill replicas as the replica's router knows them.
It has two nodes, this machine and all others, and one fit for all links.
"""

from __future__ import annotations

from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.pair_search import ELSEWHERE, WITHIN
from headrace.router.plan import Geometry, RouterSettings
from headrace.router.replica_planner.cost_models import CostModels
from headrace.router.replica_planner.engine_load import EngineLoad
from headrace.router.replica_planner.prefill_targets import PrefillTargets
from headrace_engine.step_time import Prices, StepTime
from headrace_kvstore.lookup.availability import DRAM, NVME

_HERE, _ELSEWHERE = range(2)
"""Nodes of the view: this machine, and all others."""


class ReplicaView:
    """Keeps the view of one decode replica current.

    Args:
        replica: the decode replica's id.
        prefill: name of the prefill deployment, if there is one.

    Attributes:
        view: the view that `place` reads. The decode engine's cache is holder 0. The caches of the
            prefill replicas follow in the order of their names.
    """

    def __init__(
        self, geometry: Geometry, settings: RouterSettings, replica: str, prefill: str | None
    ) -> None:
        self._replica, self._prefill = replica, prefill
        self.view = ClusterView(
            geometry.block_tokens,
            geometry.kv_bytes_per_token,
            settings,
            prefill_name=prefill or "",
        )
        for node in ("here", "elsewhere"):
            self.view.node(node)
        self.view.add(replica, "decode", _HERE, hbm=0)
        #: Step times last written into the view, by engine.
        self._written: dict[str, Prices] = {}

    def refresh(
        self,
        settings: RouterSettings,
        costs: CostModels,
        decode_load: EngineLoad,
        targets: PrefillTargets,
        coming: tuple[int, int],
        measured_s: float,
        now: float,
    ) -> None:
        """Write the measurements and the current prefill replicas into the view.

        Args:
            coming: requests that will decode here and do not yet, and tokens of their prompts.
            measured_s: when the decode engine last computed a prompt.
        """
        view = self.view
        view.settings = settings
        for medium in (DRAM, NVME):
            fit = costs.load(medium)
            for node in (_HERE, _ELSEWHERE):
                view.set_load(node, medium, fit.fixed_s, fit.each_s)
        for link in (WITHIN, ELSEWHERE):
            moved = costs.transfer
            view.set_fit(link, moved.fixed_s, moved.each_s, moved.rms_error)
        self._refresh_engine(self._replica, costs.decode_step, decode_load, now)
        engine = view.engines[view.row(self._replica)]
        engine["running"] += coming[0]
        engine["context"] += coming[1]
        engine["measured_s"] = measured_s
        engine["handoff_s"] = costs.handoff.seconds()
        engine["handoff_error_s"] = costs.handoff.rms_error
        for removed in [name for name in view.names if name not in targets]:
            if removed != self._replica:
                view.remove(removed)
                self._written.pop(removed, None)
        for holder, name in enumerate(sorted(targets), 1):
            target = targets[name]
            if name not in view:
                view.add(name, "prefill", _ELSEWHERE)
            self._refresh_engine(name, target.steps or costs.prefill_step, target.load, now)
            engine = view.engines[view.row(name)]
            engine["queue_s"] += target.others_wait_s(now, settings.remeasure_s)
            engine["hbm"], engine["node"] = holder, _HERE if target.shares_store else _ELSEWHERE
            engine["prefill"] = target.breaker.refusal(now) is None
            engine["cold"], engine["measured_s"] = target.cold, target.measured_s
            engine["call_s"], engine["call_error_s"] = costs.call.seconds(), costs.call.rms_error
        refusal = targets.refusal(now)
        if self._prefill is None:
            view.no_prefill = "there is no prefill deployment"
        elif refusal is not None:
            view.no_prefill = refusal

    def _refresh_engine(self, name: str, fit: StepTime, load: EngineLoad, now: float) -> None:
        view, row = self.view, self.view.row(name)
        if self._written.get(name) is not fit.prices():
            view.set_steps(row, fit)
            self._written[name] = fit.prices()
        engine, step_tokens = view.engines[row], view.settings.max_step_tokens
        engine["step_tokens"] = step_tokens
        engine["running"], engine["context"] = load.running, load.running_context
        engine["prompts"] = load.waiting_requests
        engine["queue_s"], engine["at_s"] = load.queue_s(fit, step_tokens, now), now

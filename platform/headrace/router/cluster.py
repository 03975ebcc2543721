"""State of all replicas as a gateway knows it, and the plans that the gateway makes from it.

A replica's report contains its queue, its running requests, and the cost of its steps, loads and
transfers. Between two reports, the gateway adds the requests that it has placed on the replica: a
plan is *booked* until a report lists it as received. Therefore several requests never see the same
idle replica, neither in a burst nor after a late report, and no request counts twice. A booking is
removed if no report lists the plan in time (`bookings`). Other gateways' requests are in the
reports.

The blocks that replicas hold are known from their KV events (`blocks`). Blocks that plans will make
count in advance (`blocks.pending_blocks`).

Pure: no I/O, no clocks. One thread owns it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.replica_health import ReplicaHealth
from headrace.router.blocks.block_index import BlockIndex
from headrace.router.blocks.block_index import warm as warm_index
from headrace.router.blocks.kv_events import KvEventProcessor
from headrace.router.blocks.pending_blocks import PendingBlocks
from headrace.router.bookings import Booking, Bookings, count_decode
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.pair_search import ELSEWHERE, WITHIN
from headrace.router.placement.place import place, rank
from headrace.router.placement.policies import make_policy
from headrace.router.placement.request import NoDecodeReplicaError, PlacementRequest
from headrace.router.plan import Plan, RouterSettings
from headrace_engine.kv_transfer.compatibility import refusal
from headrace_engine.reporting.report import Report
from headrace_engine.step_time import StepTime, pairs_of
from headrace_kvstore.lookup.availability import AvailableRun

PENDING_TIMEOUT_S = 30.0
"""How long a plan's blocks may take to arrive, beyond three times the predicted time."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to place.

    Attributes:
        keys: keys of its full blocks, [blocks] u64.
        tokens: its length.
        local_only: why the replica that answers must prefill it, or None.
        machine: machine whose store was asked; empty for none.
        stored: runs that this store can supply.
        adapter: digest of its LoRA adapter; empty without one.
    """

    keys: NDArray[np.uint64]
    tokens: int
    local_only: str | None = None
    machine: str = ""
    stored: Sequence[AvailableRun] = ()
    adapter: str = ""


class LatencyTargets(NamedTuple):
    """Targets for a request's time to first token and an engine's longest step; None for none."""

    ttft_s: float | None = None
    itl_s: float | None = None


NO_TARGETS = LatencyTargets()


class _NewReport(NamedTuple):
    """A report that the view lacks.

    Attributes:
        steps: step times that the view lacks; None if it has the newest.
        at_s: time of its arrival.
    """

    report: Report
    steps: StepTime | None
    at_s: float


class Cluster:
    """The replicas of one app.

    Args:
        settings: the router's settings.
        rng: source of plan names, and of the times at which engines are measured again.
        replica_health: state of each replica, from everything that the gateway observes.
    """

    def __init__(
        self,
        settings: RouterSettings,
        rng: random.Random | None = None,
        replica_health: ReplicaHealth | None = None,
    ) -> None:
        self.index = BlockIndex()
        self.events = KvEventProcessor(self.index)
        self.counts: Counter[str] = Counter()
        self._settings = settings
        self._policy = make_policy(settings.placement)
        self._rng = rng or random.Random()
        self.replica_health = replica_health or ReplicaHealth()
        self._pending = PendingBlocks(self.index)
        self._view: ClusterView | None = None
        self._reports: dict[str, Report] = {}
        self._new_reports: dict[str, _NewReport] = {}
        self._kinds: Counter[str] = Counter()  # replicas by KV identity
        self._machines: Counter[str] = Counter()  # replicas by machine
        self._bookings = Bookings()
        self._hidden: set[str] = set()  # replicas that the view shows as unhealthy
        self._explore_at_s = -math.inf

    # Reports and time

    def report(self, report: Report, now_s: float) -> None:
        """Take a replica's report; skip it unless it is newer than the last one.

        Engines report several times as often as a gateway plans, so the view gets the newest report
        of each replica only when it is read.

        Raises:
            ValueError: its block size or token bytes differ from the other replicas', or its step
                times are invalid.
        """
        name, view = report.replica, self._view
        kind = report.block_tokens, report.token_bytes
        if view is None or (not self._reports and kind != (view.block_tokens, view.token_bytes)):
            view = self._view = ClusterView(*kind, self._settings)
        if kind != (view.block_tokens, view.token_bytes):
            raise ValueError(
                f"{name}: blocks of {report.block_tokens} tokens of {report.token_bytes} bytes; "
                f"other replicas have {view.block_tokens} of {view.token_bytes}"
            )
        waiting, last = self._new_reports.get(name), self._reports.get(name)
        if waiting is not None:
            last = waiting.report
        if last is not None and report.seq <= last.seq:
            return
        steps = None if waiting is None else waiting.steps
        if report.steps is not None and (last is None or report.steps != last.steps):
            steps = StepTime.from_dict(report.steps)
        # In the order of arrival: the latest one decides what replicas share, as a node's loads.
        self._new_reports.pop(name, None)
        self._new_reports[name] = _NewReport(report, steps, now_s)
        if last is None:
            self._update_view()
        self._bookings.remove_received(name, report.heard)
        self.replica_health.on_report(name, now_s, draining=report.draining)

    def _update_view(self) -> None:
        """Bring the view up to date. Each method that reads or changes it calls this first."""
        if self._new_reports:
            for new in self._new_reports.values():
                self._apply_report(*new)
            self._new_reports.clear()
        unhealthy = self.replica_health.unhealthy
        for name in (self._hidden ^ unhealthy.keys()) & self._reports.keys():
            engine = self._known_view.engines[self._known_view.row(name)]
            engine[self._reports[name].role] = name not in unhealthy
            self._hidden ^= {name}

    def _apply_report(self, report: Report, steps: StepTime | None, now_s: float) -> None:
        name, view = report.replica, self._known_view
        last, node = self._reports.get(name), view.node(report.machine)
        if last is None:
            view.add(name, report.role, node, step_tokens=report.step_tokens)
            self._bookings.add_replica(name)
        row = view.row(name)
        if steps is not None:
            view.set_steps(row, steps)
        self._count(last, report)
        self._reports[name] = report
        for medium, (fixed_s, byte_s) in report.loads.items():
            view.set_load(node, medium, fixed_s, byte_s)
        engine = view.engines[row]
        engine["node"] = node
        self._update_holder(row, name)
        engine["cold"] = False  # only the decode replica knows whether it has called it before
        if report.role == "decode" and report.policy != view.settings.policy:
            view.settings = replace(view.settings, policy=report.policy)
        if last is None:  # an engine that was never measured counts as just stale
            engine["measured_s"] = now_s - self._settings.remeasure_s
        if report.computed_s is not None:
            engine["measured_s"] = max(now_s - report.computed_s, float(engine["measured_s"]))
        if report.handoff is not None:
            engine["handoff_s"], engine["handoff_error_s"] = report.handoff
        if report.transfer is not None:
            for link in (WITHIN, ELSEWHERE):
                view.set_fit(link, *report.transfer)
        ahead = self._bookings.of(name)
        engine["running"] = report.running + report.coming
        engine["context"] = report.context + report.coming_context
        engine["prompts"] = report.prompts + sum(each.tokens > 0 for each in ahead)
        engine["free_blocks"] = report.free_blocks
        view.set_block_use(row, report.block_use)
        view.set_queue(
            row,
            report.queued_tokens + sum(each.tokens for each in ahead),
            report.queued_pairs + sum(each.pairs for each in ahead),
            now_s,
        )
        for each in ahead:
            count_decode(view, row, each, report.block_use, 1)

    def remove_replica(self, replica: str) -> None:
        """Remove a replica that no longer exists."""
        if replica not in self._reports:
            return
        self._update_view()
        view = self._known_view
        holder = int(view.engines[view.row(replica)]["hbm"])
        if holder >= 0:
            self._pending.remove_holder(holder)
        view.remove(replica)
        self._count(self._reports.pop(replica), None)
        self._bookings.remove_replica(replica)
        self._hidden.discard(replica)
        self.replica_health.remove_reports(replica)

    def expire(self, now_s: float) -> None:
        """Expire bookings, expected blocks and silent replicas. Call it about once a second."""
        self.replica_health.check(now_s)
        self._update_view()
        self._pending.expire(now_s)
        self.index.maintain()
        for name, plan in self._bookings.expired(now_s):
            self._release(name, plan, now_s)
            self.counts["expired"] += 1
        if self._view is None:
            return
        # The means of all replicas' figures hold for every replica.
        calls = [report.call for report in self._reports.values() if report.call is not None]
        if calls:
            engines = self._view.engines
            engines["call_s"], engines["call_error_s"] = np.mean(calls, axis=0)

    @property
    def view(self) -> ClusterView | None:
        """View of all replicas, read only; None before the first report."""
        self._update_view()
        return self._view

    @property
    def has_step_times(self) -> bool:
        """Whether a replica has reported its engine's step times."""
        self._update_view()
        return any(report.steps is not None for report in self._reports.values())

    # Plans

    def healthy_decodes(self) -> int:
        """Return how many decode replicas may answer, that is, are healthy."""
        if self._view is None:
            return 0
        self._update_view()
        return int(np.count_nonzero(self._view.engines["decode"]))

    def plan(
        self,
        prompt: Prompt,
        now_s: float,
        targets: LatencyTargets = NO_TARGETS,
    ) -> Plan:
        """Decide where to send a request, and book it there.

        Args:
            targets: the request's targets, in place of the settings'.

        Raises:
            NoDecodeReplicaError: no decode replica may be asked.
        """
        plan = self._choose(prompt, now_s, targets, may_explore=now_s >= self._explore_at_s)
        self._book(plan, prompt, now_s)
        return plan

    def prefill_s(self, prompt: Prompt, now_s: float) -> float:
        """Return the seconds that a prompt takes an engine where it would be placed now.

        Raises:
            NoDecodeReplicaError: no decode replica may be asked.
        """
        plan = self._choose(prompt, now_s, NO_TARGETS, may_explore=False)
        return plan.predicted.get(f"{plan.kind}.compute", 0.0)

    def _choose(
        self, prompt: Prompt, now_s: float, targets: LatencyTargets, *, may_explore: bool
    ) -> Plan:
        if not self.healthy_decodes():
            raise NoDecodeReplicaError("no decode replica may be asked")
        view = self._known_view
        # The engine computes the last token, so a hit never has the block that ends with it.
        keys = prompt.keys[: max(0, prompt.tokens - 1) // view.block_tokens]
        held = np.maximum(self.index.match(keys), self._pending.match(keys))
        request = PlacementRequest(
            # A random name: unique among gateways, and not chosen by a client.
            f"{self._rng.getrandbits(64):016x}",
            prompt.tokens,
            now_s,
            held,
            available_runs=self._available_runs(view, prompt),
            affinity=int(prompt.keys[0]) if len(prompt.keys) else self._rng.getrandbits(63),
            local_only=prompt.local_only,
            itl_target_s=targets.itl_s,
            ttft_target_s=targets.ttft_s,
            adapter_s=self._adapter_s(view, prompt.adapter) if prompt.adapter else None,
            may_explore=may_explore,
        )
        if len(self._kinds) < 2:
            return place(view, request, self._policy)
        return self._place_by_kind(view, request)

    def withdraw(self, plan: Plan, now_s: float) -> None:
        """Remove a plan that will not be carried out."""
        self._update_view()
        self._pending.withdraw(plan.request_id)
        for name in (plan.decode, plan.replica):
            self._release(name, plan.request_id, now_s)
        self.counts["withdrawn"] += 1

    def oldest_report_s(self, now_s: float) -> float:
        """Return the age of the oldest replica's last report in seconds; 0 without a replica."""
        self._update_view()
        view = self._view
        if view is None:
            return 0.0
        reported_s = (float(view.engines["reported_s"][view.row(name)]) for name in self._reports)
        return now_s - min(reported_s, default=now_s)

    def stats(self, now_s: float) -> dict[str, Any]:
        """Return the state for JSON."""
        return {
            "replicas": len(self._reports),
            "oldest_report_s": round(self.oldest_report_s(now_s), 3),
            "booked": len(self._bookings),
            "plans": dict(self.counts),
            "index": self.index.stats(),
            "events": self.events.stats(),
            "pending": self._pending.stats(),
            "unhealthy": self.replica_health.to_dict(),
        }

    # Inside

    @property
    def _known_view(self) -> ClusterView:
        assert self._view is not None
        return self._view

    def _place_by_kind(self, view: ClusterView, request: PlacementRequest) -> Plan:
        """Return the best plan among replicas of one kind, over all kinds.

        Replicas differ in kind while replicas with other weights, settings or versions replace
        the old ones, or where prefill and decode replicas have different sizes. For each kind
        whose decode replicas may answer, the view shows only the replicas that can exchange KV.
        """
        roles = {role: view.engines[role].copy() for role in ("prefill", "decode")}
        plans = []
        try:
            for kind in sorted(self._kinds):
                matching = {role: np.zeros(len(view.engines), np.bool_) for role in roles}
                for name, of in self._reports.items():
                    matching["decode"][view.row(name)] = of.kv in (kind, "")
                    matching["prefill"][view.row(name)] = not refusal(of.kv, kind)
                if (roles["decode"] & matching["decode"]).any():
                    for role, may in roles.items():
                        view.engines[role] = may & matching[role]
                    plans.append(place(view, request, self._policy))
        finally:
            for role, may in roles.items():
                view.engines[role] = may
        return min(plans, key=lambda plan: (rank(plan), plan.predicted[f"{plan.kind}.total"]))

    def _count(self, before: Report | None, now: Report | None) -> None:
        """Count a replica's report in place of its earlier one; None for no report."""
        old = None if before is None else (before.kv, before.machine)
        new = None if now is None else (now.kv, now.machine)
        if old == new:
            return
        for counted, sign in ((new, 1), (old, -1)):
            if counted is None:
                continue
            kind, machine = counted
            if kind:
                self._kinds[kind] += sign
                self._kinds += Counter()  # drops kinds with a count of 0
            self._machines[machine] += sign
            if not self._machines[machine]:
                del self._machines[machine]
                self._known_view.remove_node(machine)

    def _update_holder(self, row: int, replica: str) -> None:
        """Update an engine's holder from the events, which may have given the replica a new one."""
        engine = self._known_view.engines[row]
        try:
            holder = self.events.holder(replica)
        except KeyError:
            holder = -1
        if engine["hbm"] not in (-1, holder):
            self._pending.remove_holder(int(engine["hbm"]))
        engine["hbm"] = holder

    def _adapter_s(self, view: ClusterView, adapter: str) -> NDArray[np.float64]:
        """Return `PlacementRequest.adapter_s` of an adapter.

        An engine counts the adapters that booked requests make it load among its own.
        """
        seconds = np.zeros((2, len(view.engines)))
        for name, report in self._reports.items():
            booked = self._bookings.adapters(name)
            if adapter not in report.adapters and adapter not in booked:
                is_full = len(booked.union(report.adapters)) >= report.adapter_slots
                load_s = report.adapter_load_s
                seconds[:, view.row(name)] = load_s, load_s if is_full else 0.0
        return seconds

    def _available_runs(
        self, view: ClusterView, prompt: Prompt
    ) -> Sequence[Sequence[AvailableRun]]:
        if not prompt.stored or prompt.machine not in self._machines:
            return ()
        available_runs: list[Sequence[AvailableRun]] = [()] * len(view.loads)
        available_runs[view.node(prompt.machine)] = prompt.stored
        return available_runs

    def _book(self, plan: Plan, prompt: Prompt, now_s: float) -> None:
        self.counts[plan.kind] += 1
        self.counts["prompt_tokens"] += prompt.tokens
        self.counts["held_tokens"] += prompt.tokens - plan.compute_tokens
        view = self._known_view
        view.engines[view.row(plan.replica or plan.decode)]["measured_s"] = now_s
        if plan.explores:
            # The next exploration is 1 to 1.5 periods later, so gateways do not explore together.
            self.counts["explored"] += 1
            self._explore_at_s = now_s + self._settings.remeasure_s * (
                1.0 + 0.5 * self._rng.random()
            )
        tokens = plan.compute_tokens
        pairs = pairs_of(prompt.tokens - tokens, prompt.tokens)
        work = Booking(now_s, tokens, pairs, adapter=prompt.adapter)
        answers = Booking(now_s, adapter=prompt.adapter) if plan.replica else work
        answers = answers._replace(context=prompt.tokens, decodes=True)
        for name, booking in ((plan.decode, answers), (plan.replica, work)):
            if name:
                use = self._reports[name].block_use
                self._bookings.add(view, name, plan.request_id, booking, use)
        rows = [view.row(name) for name in (plan.replica, plan.decode) if name]
        holders = [int(view.engines[row]["hbm"]) for row in rows]
        until_s = now_s + 3.0 * plan.predicted_ttft_s + PENDING_TIMEOUT_S
        self._pending.add(
            plan.request_id, [one for one in holders if one >= 0], prompt.keys, until_s
        )

    def _release(self, name: str, plan: str, now_s: float) -> None:
        if name in self._reports:
            use = self._reports[name].block_use
            self._bookings.release(self._known_view, name, plan, use, now_s)


def warm() -> None:
    """Compile the functions that placement uses, so that no request waits for it.

    Blocks the caller, for a minute if the disk cache is empty.
    """
    warm_index()
    view = ClusterView(1, 1.0)
    view.add("decode", "decode", view.node("here"))
    view.reserve(0, 1, 1.0, 0.0)
    place(view, PlacementRequest("", 1))
    index = BlockIndex(2**20)
    expected, keys = PendingBlocks(index), np.arange(2, dtype=np.uint64)
    expected.add("", [index.open()], keys, 1.0)
    expected.match(keys)

"""Autoscaling policy that Ray Serve's controller calls for the number of replicas of a role.

It is named in a deployment's `autoscaling_config`::

    policy:
      policy_function: headrace.autoscaling.serve_policy:AutoscalingPolicy
      policy_kwargs: {role: decode, prefill: [1, 4], decode: [1, 8], ttft_s: 2.0, ...}

Both roles name it with the same arguments except `role`. While too little is known, and whenever
the policy fails, it returns the result of Serve's queue-length policy, but stops no replica.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

from headrace.autoscaling import autoscaler_state
from headrace.autoscaling.capacity import ReplicaBounds, Slo
from headrace.autoscaling.replica_counts import ReplicaCosts
from headrace.autoscaling.replica_metrics import AT_S, REQUESTS

logger = logging.getLogger("ray.serve")


class AutoscalingPolicy:
    """Policy for the replicas of one role.

    Args:
        role: `prefill` or `decode`.
        prefill, decode: minimum and maximum number of replicas of each role.
        ttft_s, ttft_token_s, itl_s, slo_attainment: `capacity.Slo`.
        start_s: seconds that a replica takes to start, used until they are measured.
        drain_s: mean seconds that a replica takes to stop.
        model: the model's name in the configuration; empty if the app serves one model.

    Raises:
        ValueError: an argument is out of bounds.
    """

    def __init__(
        self,
        role: str,
        prefill: Sequence[int],
        decode: Sequence[int],
        ttft_s: float,
        ttft_token_s: float,
        itl_s: float,
        slo_attainment: float,
        start_s: float,
        drain_s: float = 20.0,
        model: str = "",
    ) -> None:
        if role not in autoscaler_state.ROLES:
            raise ValueError(f"role must be one of {autoscaler_state.ROLES}, not {role!r}")
        self.role, self.model = role, model
        self.slo = Slo(ttft_s, ttft_token_s, itl_s, slo_attainment)
        self.prices = ReplicaCosts(start_s, drain_s)
        self.bounds = ReplicaBounds((prefill[0], prefill[1]), (decode[0], decode[1]))
        self._logged_reason = ""

    def __call__(self, ctx: AutoscalingContext) -> tuple[int | float, dict[str, Any]]:
        """Return the number of replicas to have, and the state for the next call."""
        try:
            wanted = self._wanted(ctx)
        except Exception:
            logger.exception("headrace.autoscaling: cannot decide, so the queue length does")
            wanted = None
        if wanted is None:
            queued, _ = replica_queue_length_autoscaling_policy(ctx)
            wanted = max(math.ceil(queued), ctx.target_num_replicas)
        return wanted, ctx.policy_state

    def _wanted(self, ctx: AutoscalingContext) -> int | None:
        app = autoscaler_state.state_of(
            *(ctx.app_name or "", self.slo, self.prices, self.bounds), self.model
        )
        now_s = float(ctx.current_time or 0.0)
        app.record_replicas(
            self.role,
            autoscaler_state.RoleStatus(ctx.current_num_replicas, ctx.target_num_replicas),
            now_s,
        )
        if self.role == "decode" and app.is_poll_due(now_s):
            app.record_metrics(_last(ctx.raw_metrics or {}), now_s)
        counts = app.decide()
        if counts is None:
            return None
        wanted = counts.prefill if self.role == "prefill" else counts.decode
        if wanted != ctx.target_num_replicas and counts.reason != self._logged_reason:
            self._logged_reason = counts.reason
            was = ctx.target_num_replicas
            of = f" of {self.model}" if self.model else ""
            logger.info(f"headrace.autoscaling: {self.role}{of} {was} -> {wanted}: {counts.reason}")
        return wanted


def _last(metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> dict[str, dict[str, float]]:
    """Return the newest value of each metric, and the time of its requests, by replica."""
    found: dict[str, dict[str, float]] = {}
    for name, replicas in metrics.items():
        for replica, series in replicas.items():
            if series:
                one = found.setdefault(str(replica.unique_id), {})
                one[name] = float(series[-1].value)
                if name == REQUESTS:
                    one[AT_S] = float(series[-1].timestamp)
    return found

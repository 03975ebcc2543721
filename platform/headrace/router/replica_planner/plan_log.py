"""The last plans, by request id."""

from __future__ import annotations

from collections import OrderedDict

from headrace.router.plan import Plan

MAX_PLANS = 1_000


class PlanLog(OrderedDict[str, Plan]):
    """The last `MAX_PLANS` plans, oldest first."""

    def add(self, plan: Plan) -> None:
        """Add a plan, or replace the request's earlier one."""
        self[plan.request_id] = plan
        self.move_to_end(plan.request_id)
        while len(self) > MAX_PLANS:
            self.popitem(last=False)

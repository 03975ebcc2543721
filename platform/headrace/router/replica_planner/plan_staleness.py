"""Decides whether a decode replica carries out the plan that came with a request.

The gateway made the plan from the reports that it had; the replica knows its own state better. A
plan is stale if it does not fit the request, or if its prefill replica cannot be used now. The
replica then makes its own plan. Pure.
"""

from __future__ import annotations

from headrace.router.placement.pair_search import LOCAL_PARTS, REMOTE_PARTS
from headrace.router.plan import Plan, PlanRequest, Run
from headrace.router.replica_planner.prefill_targets import PrefillTargets

_PARTS = {
    kind: {f"{kind}.{part}" for part in (*parts, "total")}
    for kind, parts in (("local", LOCAL_PARTS), ("remote", REMOTE_PARTS))
}
"""Predictions that are compared with what is measured."""


def stale_reason(
    plan: Plan,
    request: PlanRequest,
    replica: str,
    policy: str,
    targets: PrefillTargets,
    now_s: float,
) -> str | None:
    """Return why a plan that came with a request is not carried out, or None if it is.

    Args:
        replica: the decode replica's id.
        policy: the decode replica's policy.
        targets: the prefill replicas that the decode replica knows.
    """
    if policy not in ("cost", plan.kind):
        return f"policy is {policy}"
    if plan.decode != replica:
        return f"it is for {plan.decode or 'no replica'}"
    tokens = len(request.token_ids)
    if plan.prompt_tokens != tokens:
        return f"it is for {plan.prompt_tokens} tokens, and the prompt has {tokens}"
    if not _is_sound(plan):
        return "its parts do not make a whole"
    if plan.prefill is None:
        return None
    if request.local_only is not None:
        return f"the prompt must be prefilled here: {request.local_only}"
    target = targets.get(plan.replica)
    if target is None:
        return f"prefill replica {plan.replica or 'of any name'} is not known here"
    if target.breaker.state(now_s) != "closed":
        return f"prefill replica {plan.replica} fails: {target.breaker.reason}"
    return None


def _is_sound(plan: Plan) -> bool:
    """Return whether the plan's runs cover the prompt, and all fields used later are there."""
    tokens = plan.prompt_tokens
    remote = plan.prefill is not None
    covers = (plan.runs, plan.fallback) if remote else (plan.runs,)
    return (
        all(_cover(runs, tokens) for runs in covers)
        and max(plan.cached_decode_tokens, plan.cached_prefill_tokens) <= tokens
        and plan.predicted.keys() >= _PARTS[plan.kind]
        and (plan.timeout_s > 0.0) is remote
    )


def _cover(runs: tuple[Run, ...], tokens: int) -> bool:
    return sum(run.tokens for run in runs) == tokens

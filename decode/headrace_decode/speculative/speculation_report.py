"""A replica's reports on speculation: prices for routing requests, and figures for metrics.

The reports are JSON-able, and made from planner and session between two steps.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.speculative.planning.draft_planner import DraftPlanner
from headrace_decode.speculative.session import SpeculationSession


def prices(
    planner: DraftPlanner, session: SpeculationSession, rows_max: int, drafts: bool = True
) -> dict[str, Any]:
    """Return the cost of tokens at 1, 2, 4, ... running requests, the last at least `rows_max`.

    Args:
        planner: the engine's draft planner.
        session: the engine's session.
        rows_max: maximum number of requests that the engine runs at the same time.
        drafts: False while speculation is broken.

    Returns:
        step_s: seconds of a step without drafts at each load, with the context of the last step's
            requests.
        draft_tokens: maximum number of tokens that one request may draft in a step at each load, 0
            while none would.
        tested_tokens, right_tokens: recent drafted tokens that were tested, and the correct ones
            among them.
        error: relative error of `step_s`, root mean square.
    """
    loads = [1 << bits for bits in range((max(rows_max, 1) - 1).bit_length() + 1)]
    context_tokens = planner.last_step.context_tokens / max(planner.last_step.rows, 1)
    step_s = [planner.times.seconds(0, rows, 0, rows * context_tokens) for rows in loads]
    cap = session.draft_tokens if session.draft_cap is None else session.draft_cap
    depth = min(session.draft_tokens, cap) if drafts else 0
    tested, right = session.acceptance_counts.recent
    return {
        "step_s": step_s,
        "draft_tokens": [planner.max_draft_tokens(rows, depth) for rows in loads],
        "tested_tokens": tested,
        "right_tokens": right,
        "error": planner.times.relative_error,
    }


def figures(planner: DraftPlanner, session: SpeculationSession) -> dict[str, Any]:
    """Return the figures for metrics.

    Returns:
        sources: drafted and accepted tokens by source, since the start.
        budget_tokens: drafted tokens in the last step.
        token_s: seconds by which one more token would have lengthened the last step.
        saved_s, regret_bound_s: the planner's (`DraftPlanner`).
        propose_s: seconds spent on drafts, since the start.
    """
    last = planner.last_step
    prompt, rows, drafted, context, pairs = last.shape
    now, ahead = (
        planner.times.seconds(prompt, rows, drafted + more, context, pairs) for more in (0, 1)
    )
    return {
        "sources": session.acceptance_counts.by_source(),
        "budget_tokens": last.drafted,
        "token_s": ahead - now,
        "saved_s": planner.saved_s,
        "regret_bound_s": planner.regret_bound_s,
        "propose_s": session.propose_s,
    }

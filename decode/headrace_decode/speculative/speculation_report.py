"""A replica's reports on speculation: step times for the console, and figures for metrics.

The reports are JSON-able, and made from planner and session between two steps.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.speculative.planning.draft_planner import DraftPlanner
from headrace_decode.speculative.session import SpeculationSession


def step_seconds(planner: DraftPlanner, rows_max: int) -> list[float]:
    """Return the seconds of a step without drafts at 1, 2, 4, ... running requests, the last at
    least `rows_max`, with the context of the last step's requests.

    Args:
        planner: the engine's draft planner.
        rows_max: maximum number of requests that the engine runs at the same time.
    """
    loads = [1 << bits for bits in range((max(rows_max, 1) - 1).bit_length() + 1)]
    context_tokens = planner.last_step.context_tokens / max(planner.last_step.rows, 1)
    return [planner.times.seconds(0, rows, 0, rows * context_tokens) for rows in loads]


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

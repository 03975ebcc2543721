"""The way of requests' usage from vLLM's scheduler to its frontend, within vLLM's statistics.

The updates travel in `SchedulerStats.ec_connector_stats`, a mapping that vLLM passes on unread. The
frontend takes them out before vLLM's own loggers see them, which refuse what they do not know. So
the scheduler counts only for a frontend that has asked for it (`ask_for_usage`), and a plain vLLM
with this scheduler has vLLM's statistics alone. `tests/unit/test_contracts_usage.py` pins what is
used here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from headrace_engine.usage.scheduler_usage import UsageUpdate

KEY = "headrace_usage"
ENVIRONMENT = "HEADRACE_USAGE"
"""Name of the variable by which a frontend asks the processes of its engine for usage."""


def ask_for_usage() -> None:
    """Have the schedulers of engines that this process starts from now on count usage."""
    os.environ[ENVIRONMENT] = "1"


def is_usage_asked_for() -> bool:
    """Return whether this process's frontend has asked for usage."""
    return ENVIRONMENT in os.environ


class UsageWatch:
    """Mixin that precedes a scheduler of vLLM among the bases."""

    def on_request_end(self, request_id: str) -> None:
        """Handle the end of a request, well or not, before its last output leaves."""

    def take_usage(self) -> UsageUpdate:
        """Return usage that the frontend does not have yet."""
        raise NotImplementedError

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.on_request_end(request.request_id)
        return found

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's statistics of a step, with the usage."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            update = self.take_usage()
            if any(update):
                stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), KEY: update}
        return stats


def pass_usage(stats: Any, add: Callable[[UsageUpdate], None]) -> None:
    """Take the usage out of vLLM's statistics (`SchedulerStats`), and pass it to `add`."""
    carrier = stats.ec_connector_stats
    if not carrier or KEY not in carrier:
        return
    update = UsageUpdate(*carrier.pop(KEY))
    if not carrier:
        stats.ec_connector_stats = None
    add(update)


def vllm_counts(stats: Any, iteration: Any) -> dict[str, float]:
    """Return what vLLM itself counts in a step, by name.

    Args:
        stats: `SchedulerStats`. iteration: `IterationStats` or None.

    Returns:
        `computed_tokens` and `decode_tokens`: scheduled tokens of requests without and with output
        tokens. `cached_tokens`: hits of the engine's own cache. `external_tokens`: hits of its
        connectors. `drafted_tokens`, `accepted_tokens`, `output_tokens`.
    """
    counts: dict[str, float] = {}
    details, drafts = stats.iteration_details, stats.spec_decoding_stats
    if details is not None and not details.is_dummy:
        counts["computed_tokens"] = details.num_ctx_tokens
        counts["decode_tokens"] = details.num_generation_tokens
    if stats.prefix_cache_stats is not None:
        counts["cached_tokens"] = stats.prefix_cache_stats.hits
    if stats.connector_prefix_cache_stats is not None:
        counts["external_tokens"] = stats.connector_prefix_cache_stats.hits
    if drafts is not None:
        counts["drafted_tokens"] = drafts.num_draft_tokens
        counts["accepted_tokens"] = drafts.num_accepted_tokens
    if iteration is not None:
        counts["output_tokens"] = iteration.num_generation_tokens
    return {name: count for name, count in counts.items() if count}

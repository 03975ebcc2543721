"""Counts what an engine's steps do for each request, in the scheduler's process.

A step's seconds run from its scheduling, or from the output of the step before it if that is later,
to its output. Each request of the step gets the share of its scheduled tokens, so the shares of a
step add up to its seconds, and no second is counted twice where steps overlap.

A request ends when vLLM frees it, well or not. If a scheduled step with the request has not ended,
its usage ends with that step.

The work of a step is a few additions for each of its requests. The growth of the tenants' sums goes
to the frontend with vLLM's statistics: of a request that ends with its last step, of those that run
on every `INTERVAL_S`, `LIVE_A_STEP` of them in a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from headrace_engine.usage.request_usage import NAMES, tenant_of_salt

INTERVAL_S = 0.5
"""Interval at which the usage of requests that run on is reported."""
LIVE_A_STEP = 64
"""Maximum number of requests that run on whose usage one step reports; each takes 2 us."""

Values = list[float]
"""Quantities in the order of `request_usage.NAMES`."""


class UsageUpdate(NamedTuple):
    """Usage that the frontend does not have yet.

    Attributes:
        growth: by tenant (empty if a request's salt names none), the growth of its sum.
        ended: requests that ended: id, tenant, and all that they cost this engine.
        step_s: seconds of the steps since the last update.
    """

    growth: dict[str, Values]
    ended: list[tuple[str, str, Values]]
    step_s: float


class KvSources(Protocol):
    """A KV connector that knows where the KV of requests came from."""

    def kv_sources(self, request_id: str) -> Mapping[str, int]:
        """Return the tokens that a request was given blocks for, by source: `dram`, `nvme`,
        `remote`, `pulled` or `blended`. Empty for a request that loads nothing, and after its
        end."""


class _Step(NamedTuple):
    """A step that was scheduled and has no output yet."""

    scheduled_s: float
    rows: Mapping[str, int]


_ZERO: Values = [0] * len(NAMES)
_INDEX = {name: number for number, name in enumerate(NAMES)}
_REQUESTS, _PROMPT, _OUTPUT = (
    _INDEX[name] for name in ("requests", "prompt_tokens", "output_tokens")
)
_COMPUTED, _DECODED, _CACHED, _DRAFTED, _ACCEPTED = (
    _INDEX[f"{name}_tokens"] for name in ("computed", "decode", "cached", "drafted", "accepted")
)
_ENGINE_S = _INDEX["engine_s"]
_SOURCES = {
    source: _INDEX[f"{source}_tokens"] for source in ("dram", "nvme", "remote", "pulled", "blended")
}


class _Account:
    """A request's usage in this engine.

    Attributes:
        values: the quantities so far. reported: those that the frontend has.
        earlier_tokens: output tokens with which a resumed request began.
        hands_over: whether the engine only computes a prompt for another one, which answers.
        is_admitted: whether it was in a step.
    """

    __slots__ = (
        *("earlier_tokens", "hands_over", "is_admitted", "reported", "request", "tenant", "values"),
    )

    def __init__(self, request: Any) -> None:
        self.request = request
        self.tenant = tenant_of_salt(request.cache_salt or "")
        self.values, self.reported = _ZERO.copy(), _ZERO
        self.earlier_tokens = int(request.num_output_tokens)
        self.hands_over = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        self.is_admitted = False

    def count_output(self) -> None:
        """Count the answer's tokens, and the request once the answer has begun."""
        values, tokens = self.values, self.request.num_output_tokens - self.earlier_tokens
        if self.hands_over or tokens <= 0:
            return
        values[_OUTPUT] = tokens
        if not self.earlier_tokens:
            values[_REQUESTS], values[_PROMPT] = 1, self.request.num_prompt_tokens


class SchedulerUsage:
    """The usage of a scheduler's requests. Without vLLM's statistics nothing is counted.

    Args:
        scheduler: vLLM's.
        clock: seconds of a monotonic clock.
        is_on: whether to count.
    """

    def __init__(
        self, scheduler: Any, clock: Callable[[], float] = time.monotonic, *, is_on: bool = True
    ) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._is_on = is_on and bool(scheduler.log_stats)
        self._accounts: dict[str, _Account] = {}
        self._steps: deque[_Step] = deque()
        self._ended: dict[str, None] = {}
        self._due: list[str] = []
        """Requests that run on and are still to be reported in this interval."""
        self._last_output_s = self._reported_s = clock()
        self._seconds = 0.0

    def after_add(self, request: Any) -> None:
        """Begin to count a new request."""
        if self._is_on and request.request_id not in self._accounts:
            self._accounts[request.request_id] = _Account(request)

    def after_schedule(self, step: Any) -> None:
        """Count the KV that new requests of a step need not compute.

        Args:
            step: vLLM's `SchedulerOutput`.
        """
        if not self._is_on:
            return
        self._steps.append(_Step(self._clock(), step.num_scheduled_tokens))
        for new in step.scheduled_new_reqs:
            account = self._accounts.get(new.req_id)
            if account is not None and not account.is_admitted:
                account.is_admitted = True
                self._count_found(account, new.num_computed_tokens)

    def before_update(self, step: Any, output: Any) -> None:
        """Count a step's tokens and seconds, now that its output is there.

        Args:
            step: vLLM's `SchedulerOutput`. output: vLLM's `ModelRunnerOutput`.
        """
        if not self._is_on:
            return
        now_s = self._clock()
        scheduled_s, rows = self._steps.popleft()
        seconds = now_s - max(scheduled_s, self._last_output_s)
        self._last_output_s = now_s
        if not rows:
            return
        self._seconds += seconds
        token_s = seconds / sum(rows.values())
        cached = step.scheduled_cached_reqs
        prompts = {new.req_id for new in step.scheduled_new_reqs}
        prompts.update(
            name
            for name, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True)
            if not tokens
        )
        accounts = self._accounts
        for name, tokens in rows.items():
            if (account := accounts.get(name)) is None:
                continue
            values = account.values
            values[_ENGINE_S] += tokens * token_s
            values[_COMPUTED if name in prompts else _DECODED] += tokens
        if step.scheduled_spec_decode_tokens:
            self._count_drafts(step, output)

    def on_end(self, request_id: str) -> None:
        """Handle the end of a request."""
        if self._is_on:
            self._ended[request_id] = None

    def take_update(self) -> UsageUpdate:
        """Return usage that the frontend does not have yet; the next steps report the rest."""
        growth: dict[str, Values] = {}
        ended: list[tuple[str, str, Values]] = []
        if self._ended:
            for name in list(self._ended):
                if any(name in step.rows for step in self._steps):
                    continue
                del self._ended[name]
                account = self._accounts.pop(name, None)
                if account is not None:
                    if not account.is_admitted:
                        self._count_unused(account)
                    self._report(account, growth)
                    ended.append((name, account.tenant, account.values))
        if not self._due and self._clock() - self._reported_s >= INTERVAL_S:
            self._reported_s = self._clock()
            self._due = list(self._accounts)
        for name in self._due[-LIVE_A_STEP:]:
            if name in self._accounts:
                self._report(self._accounts[name], growth)
        del self._due[-LIVE_A_STEP:]
        seconds, self._seconds = self._seconds, 0.0
        return UsageUpdate(growth, ended, seconds)

    @staticmethod
    def _report(account: _Account, growth: dict[str, Values]) -> None:
        """Add the cost of a request since its last report to its tenant's growth."""
        account.count_output()
        values, reported = account.values, account.reported
        if values == reported:
            return
        total = growth.get(account.tenant, _ZERO)
        growth[account.tenant] = [
            sum_ + now - then for sum_, now, then in zip(total, values, reported, strict=True)
        ]
        account.reported = values.copy()

    def _count_found(self, account: _Account, start: int) -> None:
        """Count a request's tokens before `start`, from which on it is computed, by source."""
        request, values = account.request, account.values
        sources = kv_sources(self._scheduler.connector, request.request_id)
        stats = request.prefill_stats
        if stats is not None and stats.num_prompt_tokens:
            own = min(start, stats.num_local_cached_tokens)
        else:  # a resumed stream
            own = max(0, start - sum(sources.values()))
        left = start - own
        for source, tokens in sources.items():
            used = min(left, tokens)
            left -= used
            values[_SOURCES[source]] += used
        values[_CACHED] += own + left

    def _count_unused(self, account: _Account) -> None:
        """Count the cached tokens of a request that ended while it loaded others."""
        request = account.request
        if request.num_computed_tokens and request.prefill_stats is not None:
            account.values[_CACHED] += request.prefill_stats.num_local_cached_tokens

    def _count_drafts(self, step: Any, output: Any) -> None:
        """Count verified draft tokens as vLLM's own statistics do."""
        scheduler, sampled = self._scheduler, output.sampled_token_ids
        if not sampled:
            return
        invalid = step.num_invalid_spec_tokens or {}
        for name, drafts in step.scheduled_spec_decode_tokens.items():
            request, account = scheduler.requests.get(name), self._accounts.get(name)
            if account is None or request is None or request.is_finished():
                continue
            if request.num_stale_output_tokens > 0 and request.drop_stale_output:
                continue
            tokens = sampled[output.req_id_to_index[name]]
            if len(tokens):
                account.values[_DRAFTED] += len(drafts) - invalid.get(name, 0)
                accepted = len(tokens) - scheduler.num_sampled_tokens_per_step
                account.values[_ACCEPTED] += max(0, accepted)


def kv_sources(connector: Any, request_id: str) -> dict[str, int]:
    """Return a request's `KvSources` from a scheduler's connector, or from those within it."""
    found: dict[str, int] = {}
    for child in getattr(connector, "_connectors", (connector,)):
        sources = getattr(child, "kv_sources", None)
        for source, tokens in (sources(request_id) if sources is not None else {}).items():
            found[source] = found.get(source, 0) + tokens
    return found

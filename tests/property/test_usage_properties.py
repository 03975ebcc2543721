"""Usage beside a naive model: random steps, drafts, aborts and preemptions."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.usage.request_usage import RequestUsage, usage_of_values
from headrace_engine.usage.scheduler_usage import SchedulerUsage
from headrace_engine.usage.usage_book import UsageBook
from tests.support.clock import Clock

NAMES = [f"r{number}" for number in range(6)]


class Request:
    """A request of the scheduler, as far as usage reads it."""

    def __init__(self, name: str, tenant: str, prompt: int, cached: int) -> None:
        self.request_id, self.cache_salt = name, f"tenant:{tenant}:"
        self.num_prompt_tokens, self.cached = prompt, min(cached, prompt - 1)
        self.num_output_tokens = self.num_computed_tokens = 0
        self.num_stale_output_tokens, self.drop_stale_output = 0, False
        self.kv_transfer_params = None
        self.prefill_stats = SimpleNamespace(
            num_prompt_tokens=prompt, num_local_cached_tokens=self.cached
        )
        self.scheduled_once = self.ended = False

    def is_finished(self) -> bool:
        return self.ended


row = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 50),
        "drafts": st.integers(0, 3),
        "accepted": st.integers(0, 3),
        "seconds": st.floats(0, 2),
    }
)
"""What a request does in a step."""
step = st.fixed_dictionaries(
    {
        "rows": st.dictionaries(st.sampled_from(NAMES), row),
        "wait": st.floats(0, 1),
        "took": st.floats(0.001, 1),
        "aborts": st.sets(st.sampled_from(NAMES), max_size=2),
        "ends": st.sets(st.sampled_from(NAMES), max_size=2),
        "tells": st.booleans(),
    }
)


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(["shop", "bank"]), st.integers(1, 90), st.integers(0, 90)),
        min_size=len(NAMES),
        max_size=len(NAMES),
    ),
    steps=st.lists(step, max_size=12),
    ahead=st.booleans(),
)
def test_the_sum_over_requests_is_what_the_steps_did(
    requests: list[tuple[str, int, int]], steps: list[dict[str, Any]], ahead: bool
) -> None:
    """Also where a step is scheduled before the one before it has ended."""
    clock, counted, book = Clock(), Counter[str](), UsageBook()
    scheduler = SimpleNamespace(
        log_stats=True, connector=None, requests={}, num_sampled_tokens_per_step=1
    )
    usage = SchedulerUsage(scheduler, clock)
    ended: list[str] = []
    by_request: dict[str, RequestUsage] = {}

    def tell() -> None:
        update = usage.take_update()
        book.add(update)
        for name, _, values in update.ended:
            by_request[name] = usage_of_values(values)
            ended.append(name)

    def finish(name: str) -> None:
        request = scheduler.requests.pop(name, None)
        if request is not None:
            request.ended = True
            usage.on_end(name)

    for name, each in zip(NAMES, requests, strict=True):
        request = scheduler.requests[name] = Request(name, *each)
        usage.after_add(request)

    flying: list[tuple[Any, Any, dict[str, Any]]] = []

    def land() -> None:
        scheduled, output, plan = flying.pop(0)
        clock.now_s += plan["took"]
        for name in plan["aborts"]:
            finish(name)
        usage.before_update(scheduled, output)
        for name in scheduled.scheduled_spec_decode_tokens:
            if name in scheduler.requests:
                accepted = len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1
                counted["drafted_tokens"] += len(scheduled.scheduled_spec_decode_tokens[name])
                counted["accepted_tokens"] += accepted
        for name in plan["ends"] & scheduled.num_scheduled_tokens.keys():
            finish(name)
        if plan["tells"]:
            tell()

    for plan in steps:
        clock.now_s += plan["wait"]
        rows = {n: r for n, r in plan["rows"].items() if n in scheduler.requests}
        new, cached, outputs = [], [], []
        for name in rows:
            request = scheduler.requests[name]
            if not request.scheduled_once:
                request.scheduled_once = True
                request.num_computed_tokens = request.cached
                counted["cached_tokens"] += request.cached
                new.append(SimpleNamespace(req_id=name, num_computed_tokens=request.cached))
                counted["computed_tokens"] += rows[name]["tokens"] + rows[name]["drafts"]
            else:
                cached.append(name)
                outputs.append(request.num_output_tokens)
                kind = "decode_tokens" if request.num_output_tokens else "computed_tokens"
                counted[kind] += rows[name]["tokens"] + rows[name]["drafts"]
            request.num_output_tokens += 1
        sampled = [[1] * (1 + min(r["accepted"], r["drafts"])) for r in rows.values()]
        scheduled = SimpleNamespace(
            num_scheduled_tokens={n: r["tokens"] + r["drafts"] for n, r in rows.items()},
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=cached, num_output_tokens=outputs),
            scheduled_spec_decode_tokens={
                n: [5] * r["drafts"] for n, r in rows.items() if r["drafts"]
            },
            num_invalid_spec_tokens=None,
        )
        output = SimpleNamespace(
            sampled_token_ids=sampled, req_id_to_index={n: i for i, n in enumerate(rows)}
        )
        usage.after_schedule(scheduled)
        flying.append((scheduled, output, plan))
        while len(flying) > int(ahead):
            land()
    while flying:
        land()
    for name in NAMES:
        finish(name)
    tell()

    total = RequestUsage()
    for each in by_request.values():
        total.add(each)
    assert sorted(ended) == NAMES, "each request ends once"
    for name in ("computed_tokens", "decode_tokens", "cached_tokens"):
        assert getattr(total, name) == counted[name], name
    assert total.drafted_tokens == counted["drafted_tokens"]
    assert total.accepted_tokens == counted["accepted_tokens"]
    assert total.engine_s == pytest.approx(book.step_s)
    by_tenant = RequestUsage()
    for each in book.totals.values():
        by_tenant.add(each)
    assert by_tenant.engine_s == pytest.approx(total.engine_s)
    assert by_tenant.values()[:-1] == total.values()[:-1]

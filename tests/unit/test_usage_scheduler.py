"""What is counted for each request of a scheduler: by step, by source of its KV, at each end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.usage.request_usage import RequestUsage, usage_of_values
from headrace_engine.usage.scheduler_usage import INTERVAL_S, Row, SchedulerUsage, kv_sources
from headrace_engine.vllm.scheduling import RequestStatus
from headrace_engine.vllm.usage_stats import pass_usage
from tests.support.clock import Clock
from tests.support.scheduled import BLOCK, Scheduled


class Counted(Scheduled):
    """A scheduler with statistics, whose usage is kept as a frontend would get it."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, scheduler=partial(ExtensibleScheduler, log_stats=True), **more)
        self.rows: list[Row] = []
        self.step_s = 0.0
        self._stats = self.scheduler.make_stats
        self.scheduler.make_stats = self._told

    def _told(self, *args: Any, **kwargs: Any) -> Any:
        stats = self._stats(*args, **kwargs)
        pass_usage(stats, self._add)
        return stats

    def _add(self, rows: list[Row], step_s: float) -> None:
        self.rows += rows
        self.step_s += step_s

    def usage(self, name: str) -> RequestUsage:
        """A request's usage as far as it was told."""
        found = RequestUsage()
        for request_id, _, _, values in self.rows:
            if request_id == name:
                found.add(usage_of_values(values))
        return found

    def run(self, limit: int = 200) -> None:
        """Until no request is left, and the last one's end was told."""
        self.until(lambda: not self.scheduler.requests)
        self.step()

    def ended(self) -> list[str]:
        return [name for name, _, has_ended, _ in self.rows if has_ended]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Counted]:
    made = Counted(tmp_path)
    yield made
    made.close()


def test_a_new_prompt_is_computed_and_its_answer_decoded(engine: Counted) -> None:
    engine.add("a", 300, 5, salt="tenant:shop:own")
    engine.run()
    usage = engine.usage("a")
    assert (usage.requests, usage.prompt_tokens, usage.output_tokens) == (1, 300, 5)
    assert (usage.computed_tokens, usage.decode_tokens, usage.cached_tokens) == (300, 4, 0)
    assert [row[:3] for row in engine.rows if row[2]] == [("a", "shop", True)]


def test_blocks_in_the_engines_cache_are_cached_tokens(engine: Counted) -> None:
    for name in "ab":
        engine.add(name, 300, 1)
        engine.run()
    usage = engine.usage("b")
    assert (usage.cached_tokens, usage.computed_tokens) == (2 * BLOCK, 300 - 2 * BLOCK)


def test_blocks_from_the_store_are_counted_by_tier(engine: Counted) -> None:
    engine.served("a", 700)
    engine.add("b", 700, 1)
    engine.run()
    usage = engine.usage("b")
    assert (usage.dram_tokens, usage.cached_tokens) == (5 * BLOCK, 0)
    assert usage.prompt_tokens == usage.computed_tokens + usage.dram_tokens


def test_the_requests_of_a_step_share_its_seconds_by_their_tokens(engine: Counted) -> None:
    engine.add("long", 600, 1)
    engine.add("short", 200, 1)
    engine.step()
    engine.step()
    long, short = engine.usage("long"), engine.usage("short")
    assert long.engine_s == pytest.approx(3 * short.engine_s)
    assert long.engine_s + short.engine_s == pytest.approx(engine.step_s)


def test_an_aborted_request_ends_with_what_was_computed(engine: Counted) -> None:
    engine.add("a", 300, 50)
    engine.step()
    engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.step()
    usage = engine.usage("a")
    assert engine.ended() == ["a"]
    assert (usage.computed_tokens, usage.decode_tokens, usage.output_tokens) == (300, 1, 2)


def test_a_request_that_never_was_in_a_step_ends_with_nothing(engine: Counted) -> None:
    engine.add("a", 300, 5)
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert engine.ended() == ["a"] and engine.usage("a") == RequestUsage()


def test_a_preempted_request_pays_again_and_counts_once(tmp_path: Path) -> None:
    """Two requests whose answers need more blocks than there are."""
    engine = Counted(tmp_path, blocks=7, store={"load": False})
    for name, prompt in (("a", 380), ("b", 381)):
        engine.add(name, prompt, 40)
    engine.run()
    usage = RequestUsage()
    for name in "ab":
        usage.add(engine.usage(name))
    assert usage.requests == 2 and usage.prompt_tokens == 761 and usage.output_tokens == 80
    scheduled = sum(sum(step.values()) for step in engine.steps)
    assert usage.computed_tokens + usage.decode_tokens == scheduled
    assert usage.decode_tokens > 78, "what was preempted was computed again"
    assert usage.engine_s == pytest.approx(engine.step_s)
    engine.close()


def test_a_prompt_for_another_engine_counts_no_answer(engine: Counted) -> None:
    params = {"kv_transfer_params": {"do_remote_decode": True}}
    engine.add("a", 300, 1, extra=params)
    engine.run()
    usage = engine.usage("a")
    assert (usage.requests, usage.prompt_tokens, usage.output_tokens) == (0, 0, 0)
    assert usage.computed_tokens == 300


def test_a_resumed_stream_is_no_new_request(engine: Counted) -> None:
    engine.add("a", 300, 6, extra={"headrace_resume_tokens": [30, 31, 32]})
    engine.run()
    usage = engine.usage("a")
    assert (usage.requests, usage.prompt_tokens, usage.output_tokens) == (0, 0, 3)
    assert usage.computed_tokens == 303


def test_requests_that_run_on_are_told_at_an_interval() -> None:
    clock = Clock()
    scheduler = SimpleNamespace(log_stats=True, connector=None, requests={})
    usage = SchedulerUsage(scheduler, clock)
    request = SimpleNamespace(
        request_id="a",
        cache_salt=None,
        num_output_tokens=0,
        num_prompt_tokens=4,
        kv_transfer_params=None,
        prefill_stats=None,
    )
    usage.after_add(request)
    step = step_of(a=4)
    usage.after_schedule(step)
    clock.now_s += 0.1
    usage.before_update(step, None)
    assert usage.rows() == []
    clock.now_s += INTERVAL_S
    [(name, tenant, has_ended, values)] = usage.rows()
    assert (name, tenant, has_ended) == ("a", "", False)
    assert usage_of_values(values).engine_s == pytest.approx(0.1)
    clock.now_s += INTERVAL_S
    assert usage.rows() == [], "nothing has changed"


def test_a_request_that_ends_within_a_later_step_waits_for_its_output() -> None:
    """Where steps overlap, the step after the last token is in flight already."""
    clock = Clock()
    usage = SchedulerUsage(SimpleNamespace(log_stats=True, connector=None, requests={}), clock)
    request = SimpleNamespace(
        request_id="a",
        cache_salt="",
        num_output_tokens=1,
        num_prompt_tokens=4,
        kv_transfer_params=None,
        prefill_stats=None,
        num_computed_tokens=4,
    )
    usage.after_add(request)
    first, second = step_of(a=4), step_of(a=1)
    usage.after_schedule(first)
    clock.now_s += 1.0
    usage.after_schedule(second)
    clock.now_s += 1.0
    usage.before_update(first, None)
    usage.on_end("a")
    [early] = usage.rows()
    assert not early[2]
    clock.now_s += 1.0
    usage.before_update(second, None)
    [last] = usage.rows()
    seconds = [usage_of_values(row[3]).engine_s for row in (early, last)]
    assert last[2] and sum(seconds) == pytest.approx(3.0)
    assert usage.seconds == pytest.approx(3.0), "steps that overlap count each second once"


def test_a_scheduler_without_statistics_counts_nothing(tmp_path: Path) -> None:
    engine = Scheduled(tmp_path, scheduler=ExtensibleScheduler)
    engine.add("a", 300, 2)
    engine.until(lambda: not engine.scheduler.requests)
    assert engine.scheduler.usage.rows() == [] and not engine.scheduler.usage.seconds
    engine.close()


def test_sources_are_asked_of_each_connector_that_knows_them() -> None:
    pulls = SimpleNamespace(kv_sources=lambda name: {"pulled": 10} if name == "a" else {})
    stores = SimpleNamespace(kv_sources=lambda name: {"dram": 5, "nvme": 2})
    both = SimpleNamespace(_connectors=[pulls, SimpleNamespace(), stores])
    assert kv_sources(both, "a") == {"pulled": 10, "dram": 5, "nvme": 2}
    assert kv_sources(pulls, "b") == {} == kv_sources(None, "a")


def step_of(**rows: int) -> Any:
    """A step with these requests, new ones."""
    new = [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in rows]
    cached = SimpleNamespace(req_ids=[], num_output_tokens=[])
    return SimpleNamespace(
        num_scheduled_tokens=rows,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        scheduled_spec_decode_tokens={},
        num_invalid_spec_tokens=None,
    )

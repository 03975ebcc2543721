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
from headrace_engine.usage.scheduler_usage import (
    INTERVAL_S,
    LIVE_A_STEP,
    SchedulerUsage,
    UsageUpdate,
    kv_sources,
)
from headrace_engine.vllm.scheduling import RequestStatus
from headrace_engine.vllm.usage_stats import ENVIRONMENT, pass_usage
from tests.support.clock import Clock
from tests.support.scheduled import BLOCK, Scheduled


class Counted(Scheduled):
    """A scheduler with statistics, whose usage is kept as a frontend would get it."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, scheduler=partial(ExtensibleScheduler, log_stats=True), **more)
        self.update: list[UsageUpdate] = []
        self._stats = self.scheduler.make_stats
        self.scheduler.make_stats = self._told

    def _told(self, *args: Any, **kwargs: Any) -> Any:
        stats = self._stats(*args, **kwargs)
        pass_usage(stats, self.update.append)
        return stats

    @property
    def step_s(self) -> float:
        return sum(each.step_s for each in self.update)

    def usage(self, name: str) -> RequestUsage:
        """A request's usage, once it has ended."""
        [found] = [values for each in self.update for n, _, values in each.ended if n == name]
        return usage_of_values(found)

    def tenant(self, name: str = "") -> RequestUsage:
        """A tenant's sum."""
        found = RequestUsage()
        for each in self.update:
            found.add(usage_of_values(each.growth.get(name, RequestUsage().values())))
        return found

    def run(self, limit: int = 200) -> None:
        """Until no request is left, and the last one's end was told."""
        self.until(lambda: not self.scheduler.requests)
        self.step()

    def ended(self) -> list[str]:
        return [name for each in self.update for name, _, _ in each.ended]


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage is counted."""
    monkeypatch.setenv(ENVIRONMENT, "1")


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
    assert engine.tenant("shop") == usage and engine.tenant("") == RequestUsage()


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
    engine.run()
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
    usage.after_add(request_of("a"))
    step = step_of(a=4)
    usage.after_schedule(step)
    clock.now_s += 0.1
    usage.before_update(step, None)
    assert usage.take_update().growth == {}
    clock.now_s += INTERVAL_S
    update = usage.take_update()
    assert not update.ended and usage_of_values(update.growth[""]).computed_tokens == 4
    clock.now_s += INTERVAL_S
    assert not any(usage.take_update()), "nothing has changed"


def test_a_step_tells_of_a_limited_number_of_requests() -> None:
    clock = Clock()
    usage = SchedulerUsage(SimpleNamespace(log_stats=True, connector=None, requests={}), clock)
    names = [f"r{number}" for number in range(2 * LIVE_A_STEP + 1)]
    for name in names:
        usage.after_add(request_of(name))
    step = step_of(**dict.fromkeys(names, 1))
    usage.after_schedule(step)
    clock.now_s += INTERVAL_S
    usage.before_update(step, None)
    told = [usage_of_values(usage.take_update().growth[""]).computed_tokens for _ in range(3)]
    assert told == [LIVE_A_STEP, LIVE_A_STEP, 1] and not any(usage.take_update())


def test_a_request_that_ends_within_a_later_step_waits_for_its_output() -> None:
    """Where steps overlap, the step after the last token is in flight already."""
    clock = Clock()
    usage = SchedulerUsage(SimpleNamespace(log_stats=True, connector=None, requests={}), clock)
    usage.after_add(request_of("a"))
    first, second = step_of(a=4), step_of(a=1)
    usage.after_schedule(first)
    clock.now_s += 1.0
    usage.after_schedule(second)
    clock.now_s += 1.0
    usage.before_update(first, None)
    usage.on_end("a")
    early = usage.take_update()
    assert not early.ended
    clock.now_s += 1.0
    usage.before_update(second, None)
    last = usage.take_update()
    [(_, _, values)] = last.ended
    assert usage_of_values(values).engine_s == pytest.approx(3.0)
    seconds = early.step_s + last.step_s
    assert seconds == pytest.approx(3.0), "steps that overlap count each second once"


def test_a_scheduler_without_statistics_counts_nothing(tmp_path: Path) -> None:
    engine = Scheduled(tmp_path, scheduler=ExtensibleScheduler)
    engine.add("a", 300, 2)
    engine.until(lambda: not engine.scheduler.requests)
    assert not any(engine.scheduler.usage.take_update())
    engine.close()


def test_sources_are_asked_of_each_connector_that_knows_them() -> None:
    pulls = SimpleNamespace(kv_sources=lambda name: {"pulled": 10} if name == "a" else {})
    stores = SimpleNamespace(kv_sources=lambda name: {"dram": 5, "nvme": 2})
    both = SimpleNamespace(_connectors=[pulls, SimpleNamespace(), stores])
    assert kv_sources(both, "a") == {"pulled": 10, "dram": 5, "nvme": 2}
    assert kv_sources(pulls, "b") == {} == kv_sources(None, "a")


def request_of(name: str) -> Any:
    """A new request of no tenant."""
    return SimpleNamespace(
        request_id=name,
        cache_salt=None,
        num_output_tokens=0,
        num_prompt_tokens=4,
        num_computed_tokens=0,
        kv_transfer_params=None,
        prefill_stats=None,
    )


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

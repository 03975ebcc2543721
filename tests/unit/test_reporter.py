"""When a replica reports, and what lies ahead of a prompt on its engine."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace_engine.meter import EngineMeter, Step
from headrace_engine.reporting.prompt_backlog import PromptBacklog, ReceivedPlans
from headrace_engine.reporting.report import HEARD_S, MAX_HEARD, Report
from headrace_engine.reporting.reporter import EVERY_S, EngineFacts, Reporter
from headrace_engine.step_time import pairs_of

IDENTITY = {"replica": "a", "role": "decode", "machine": "m"}


class Line:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.has_subscribers = True

    def report(self, report: Report) -> None:
        self.reports.append(report)


def facts(meter: EngineMeter | None = None) -> EngineFacts:
    return EngineFacts(
        meter or EngineMeter(), block_tokens=16, token_bytes=64, step_tokens=512, blocks=100
    )


def listened(line: Any, *more: Any) -> Reporter:
    """A reporter to whom somebody begins to listen."""
    reporter = Reporter(line, lambda: IDENTITY, facts(), *more)
    reporter.now()
    return reporter


# What an engine says


def test_an_engines_load_is_that_of_its_last_step() -> None:
    meter = EngineMeter()
    engine = facts(meter)
    meter.load(3, 1, 0.25)
    meter.step(Step(0, 3, 0, 700.0, 0.0, 0.01))
    said = engine()
    assert (said["running"], said["context"], said["free_blocks"]) == (3, 700, 75)
    assert said["steps"]["samples"] == 1
    meter.load(0, 0, 0.0)
    assert (engine()["running"], engine()["context"]) == (0, 0)


def test_a_change_of_what_decodes_is_told() -> None:
    meter = EngineMeter()
    engine = facts(meter)
    told: list[None] = []
    engine.on_rows.append(lambda: told.append(None))
    for rows in (1, 1, 2, 2, 1):
        meter.step(Step(0, rows, 0, 10.0, 0.0, 0.01))
    assert len(told) == 3


# When


async def test_a_change_is_reported_soon_and_many_at_once() -> None:
    line: Any = Line()
    reporter = listened(line)
    assert len(line.reports) == 1, "the first at once"
    for _ in range(100):
        reporter.changed()
    await asyncio.sleep(0.08)
    assert len(line.reports) == 2
    reporter.close()
    reporter.changed()
    await asyncio.sleep(0.05)
    assert len(line.reports) == 2


async def test_a_replica_where_nothing_happens_reports_all_the_same() -> None:
    line: Any = Line()
    reporter = listened(line)
    await asyncio.sleep(3.5 * EVERY_S)
    assert 3 <= len(line.reports) <= 4
    reporter.close()


async def test_nothing_is_reported_while_nobody_listens() -> None:
    line: Any = Line()
    line.has_subscribers = False
    reporter = Reporter(line, lambda: IDENTITY, facts())
    reporter.changed()
    await asyncio.sleep(0.05)
    assert line.reports == []
    line.has_subscribers = True
    reporter.now()
    await asyncio.sleep(1.5 * EVERY_S)
    assert len(line.reports) == 2
    line.has_subscribers = False
    await asyncio.sleep(1.5 * EVERY_S)
    assert len(line.reports) == 2
    reporter.close()


async def test_later_facts_go_before_earlier_ones_and_failures_do_not_end_it() -> None:
    line: Any = Line()
    broken: list[Any] = []

    def more() -> dict[str, Any]:
        if broken:
            raise RuntimeError("no")
        return {"running": 9, "queued_tokens": 5}

    reporter = listened(line, more)
    assert (line.reports[0].running, line.reports[0].queued_tokens) == (9, 5)
    broken.append(1)
    reporter.now()
    assert (len(line.reports), reporter.failures) == (1, 1)
    broken.clear()
    await asyncio.sleep(1.5 * EVERY_S)
    assert len(line.reports) >= 2
    reporter.close()


async def test_a_fact_that_cannot_be_is_not_reported() -> None:
    line: Any = Line()
    reporter = listened(line, lambda: {"running": -1})
    assert (line.reports, reporter.failures) == ([], 1)
    reporter.close()


# What is ahead


def test_prompts_are_ahead_from_their_arrival_to_their_end() -> None:
    ahead = PromptBacklog()
    ahead.arrived("a", 100, 100)
    ahead.arrived("b", 100, 40)
    assert ahead.tokens == 140
    assert ahead.pairs == pairs_of(0, 100) + pairs_of(60, 100)
    ahead.ended("a")
    assert (ahead.tokens, ahead.pairs) == (40, pairs_of(60, 100))
    ahead.ended("b")
    ahead.ended("b")
    assert (ahead.tokens, ahead.pairs) == (0, 0)


def test_what_was_computed_is_not_ahead_any_more() -> None:
    ahead = PromptBacklog()
    ahead.computed(50, 100)
    ahead.arrived("a", 100, 100)
    ahead.arrived("b", 100, 100)
    ahead.computed(64, pairs_of(0, 64))
    assert (ahead.tokens, ahead.pairs) == (136, 2 * pairs_of(0, 100) - pairs_of(0, 64))
    ahead.computed(64, pairs_of(64, 100) + pairs_of(0, 28))
    assert ahead.tokens == 72
    ahead.ended("a")
    assert ahead.tokens == 72
    ahead.computed(1000, 1e9)
    assert (ahead.tokens, ahead.pairs) == (0, 0)
    ahead.arrived("c", 10, 10)
    ahead.ended("b")
    assert ahead.tokens == 10


def test_a_prompt_computes_at_least_a_token_and_no_more_than_it_has() -> None:
    ahead = PromptBacklog()
    ahead.arrived("a", 100, 0)
    assert ahead.tokens == 1
    ahead.arrived("a", 100, 500)
    assert ahead.tokens == 100


def test_plans_are_named_for_a_while_and_not_without_bound() -> None:
    heard = ReceivedPlans()
    heard.add("a", 0.0)
    heard.add("b", 1.0)
    assert heard.recent(HEARD_S) == ("a", "b")
    assert heard.recent(HEARD_S + 0.5) == ("b",)
    heard.add("b", HEARD_S + 0.5)
    assert heard.recent(HEARD_S + 2.0) == ("b",)
    for n in range(MAX_HEARD + 10):
        heard.add(str(n), 10.0)
    assert heard.recent(10.0) == tuple(str(n) for n in range(10, MAX_HEARD + 10))

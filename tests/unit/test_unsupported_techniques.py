"""A technique that an engine cannot do costs nothing: nobody is offered it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from headrace_decode.llm.planned_llm import PlannedLLM, Planning
from headrace_decode.planning.blending_planner import BlendingPlan, BlendingPlanner, blending_work
from headrace_decode.planning.prefill_executor import PrefillExecutor, Work
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.extensions.worker import WorkerWithExtensions
from headrace_engine.kv_transfer.handoff import BLENDED_KEY, PrefillRequest
from headrace_engine.rank_group import RankGroup
from headrace_prefill.blending.engine.worker import BlendingWorkerPart
from headrace_prefill.server import PrefillServer
from tests.support.prefill_executor import Planner

MODES = {"sparse": ("auto", 0.1), "compression": ("request", 0.25)}


def llm(answers: Any, scheduler: type = ExtensibleScheduler, blends: bool = True) -> PlannedLLM:
    """A frontend whose engine's workers answer so."""
    made = cast(Any, object.__new__(PlannedLLM))
    blending = None
    if blends:
        blending = BlendingPlanner(cast(Any, None), lambda ids, salt: [], "auto", 0.1)
    parts = cast(Any, None)
    made.planning = Planning(parts, parts, parts, parts, blending=blending)
    made._lossy_modes, made._compresses_prompts, made.lossy_store = dict(MODES), False, ""
    config = SimpleNamespace(get_scheduler_cls=lambda: scheduler)
    made.vllm_config = SimpleNamespace(scheduler_config=config)

    async def collective_rpc(method: str) -> Any:
        assert method == "headrace_unsupported"
        if isinstance(answers, Exception):
            raise answers
        return answers

    made.collective_rpc = collective_rpc
    return cast(PlannedLLM, made)


@pytest.mark.parametrize(
    ("answers", "offered"),
    [
        ([{}], "blending=auto, sparse=auto, compression=request"),
        ([{"blending": "no rows"}], "sparse=auto, compression=request"),
        ([{"compression": "YaRN"}], "blending=auto, sparse=auto"),
        ([{}, {"sparse": "no", "compression": "no"}], "blending=auto"),
        ([{"sparse": "no", "compression": "no", "blending": "no"}], ""),
        (RuntimeError("no such method"), ""),
    ],
)
async def test_what_every_worker_can_do_is_offered(answers: Any, offered: str) -> None:
    one = llm(answers)
    await one.withdraw_unsupported_techniques()
    assert one.offered_techniques == offered


async def test_why_not_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await llm(
        [{"blending": "rows of Mixtral cannot be recomputed"}]
    ).withdraw_unsupported_techniques()
    [record] = caplog.records
    assert "as if they had not asked for blending: rows of Mixtral" in record.getMessage()


async def test_a_scheduler_of_the_users_own_shares_answers_so_none_may_be_approximate() -> None:
    one = llm([{}], Scheduler)
    await one.withdraw_unsupported_techniques()
    assert one.offered_techniques == "blending=auto"


async def test_an_engine_without_techniques_is_asked_nothing() -> None:
    one = llm(AssertionError("asked"), blends=False)
    one._lossy_modes = {}
    await one.withdraw_unsupported_techniques()
    assert one.offered_techniques == ""


class Wants:
    """A connector that blends."""

    why: str | None = None

    def bind_rows(self, rows: Any) -> None:
        raise AssertionError("it has no rows")

    def no_rows(self, why: str) -> None:
        self.why = why


def bound(
    monkeypatch: pytest.MonkeyPatch,
    connector: Wants,
    rows: Any,
    ranks: RankGroup,
    check: Any = lambda *_: None,
) -> dict[str, str]:
    """What a worker with this connector cannot do once it has a KV cache."""
    from headrace_prefill.blending.engine import row_check, worker

    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100))
    monkeypatch.setattr(row_check, "check_rows", check)
    monkeypatch.setattr(worker, "worker_connectors", lambda: [object(), connector])
    monkeypatch.setattr(worker, "row_engine", rows)
    monkeypatch.setattr(worker, "engine_ranks", lambda: ranks)

    class Plain:
        vllm_config = config

        def initialize_from_config(self, config: Any) -> None: ...

    class Mine(WorkerWithExtensions, Plain): ...

    mine = Mine()
    mine.set_parts([BlendingWorkerPart(mine)])
    mine.initialize_from_config(None)
    return mine.headrace_unsupported()


@pytest.mark.parametrize("error", [ValueError("rope_type 'yarn'"), IndexError("a cache of 3")])
def test_a_model_whose_rows_cannot_be_computed_does_not_keep_its_engine_from_starting(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = Wants()

    def rows(*_: Any) -> Any:
        raise error

    told = bound(monkeypatch, connector, rows, RankGroup())
    assert str(error) in told["blending"] and connector.why == told["blending"]


def test_rows_that_are_not_the_models_own_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = Wants()
    connector.bind_rows = lambda rows: None  # type: ignore[method-assign]

    def check(*_: Any) -> None:
        raise ValueError("it scales embeddings")

    told = bound(monkeypatch, connector, lambda *_: object(), RankGroup(), check)
    assert told == {"blending": "it scales embeddings"} and connector.why == told["blending"]


def test_no_rank_computes_rows_if_one_of_them_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others(RankGroup):
        def union(self, names: Any, among: Any) -> set[str]:
            return set(among)

    connector = Wants()
    connector.bind_rows = lambda rows: None  # type: ignore[method-assign]
    told = bound(monkeypatch, connector, lambda *_: object(), Others())
    assert told == {} and connector.why == "another rank cannot recompute rows"


def test_an_engine_without_a_connector_that_blends_leaves_nothing_out() -> None:
    assert BlendingWorkerPart(None).unsupported() == {}


@pytest.mark.parametrize(
    ("left_out", "blending"), [({}, {"runs": []}), ({"blending": "no rows"}, None)]
)
def test_a_prefill_engine_that_cannot_blend_is_not_asked_to(left_out: Any, blending: Any) -> None:
    server: Any = object.__new__(PrefillServer)
    server.engine = SimpleNamespace(left_out=left_out)
    assert server._blending_of(PrefillRequest("r", b"", blending={"runs": []})) == blending
    assert server._blending_of(PrefillRequest("r", b"")) is None


def work(cached: int) -> Work[Any]:
    async def submit(name: str, kv_params: Any) -> Any:
        yield SimpleNamespace(cached=cached)

    return Work(
        request_id="r",
        token_ids=list(range(100)),
        salt="ann",
        local_only=None,
        submit=submit,
        prefill=cast(Any, None),
        release=cast(Any, None),
        cached_tokens=lambda output: int(output.cached),
        new_tokens=lambda output: [7],
    )


@pytest.mark.parametrize(
    ("params", "cached", "happened"),
    [
        (None, 99, True),
        (None, 64, False),
        (None, 0, False),
        ({}, 99, False),
        ({BLENDED_KEY: True}, 100, True),
    ],
)
async def test_who_computed_the_prompt_tells_whether_kv_was_reused(
    params: Any, cached: int, happened: bool
) -> None:
    reuse = BlendingPlan("technique:blending-1:ann", {}, 30, 80)
    one = blending_work(work(cached), reuse)
    assert (one.salt, one.computed) == (reuse.salt, 30)
    [output] = [each async for each in one.submit("r", params)]
    assert one.cached_tokens(output) == (min(70, cached) if happened else cached)
    assert reuse.was_blended == happened


async def test_planners_hear_which_answers_others_can_use() -> None:
    for private in (False, True):
        planner = cast(Any, Planner(None))
        told: list[dict[str, Any]] = []
        planner.finished = lambda *_, told=told, **more: told.append(more)
        one = work(0)
        one = Work(**{n: getattr(one, n) for n in one.__slots__} | {"private_answer": private})
        async for _ in PrefillExecutor(planner).run(one):
            pass
        assert told == ([{"shared": False}] if private else [{}])

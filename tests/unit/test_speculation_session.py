"""What the session makes of an engine's rows, and that the proposer survives whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftBatch
from headrace_decode.speculative.planning.draft_guard import CONTROL_WHILE_UNDECIDED
from headrace_decode.speculative.planning.draft_planner import DraftMode, DraftPlanner, StepRecord
from headrace_decode.speculative.proposer import MAX_FAILURES, HeadraceProposer
from headrace_decode.speculative.request_info import (
    OPT_OUT_KEY,
    REQUEST_KEY,
    RequestInfo,
    parse_request_info,
    request_arguments,
)
from headrace_decode.speculative.session import BatchRows, SpeculationSession, kv_headroom
from headrace_decode.speculative.settings import CONFIG_KEY, SpeculationSettings, engine_arguments
from tests.support.kvnode import until

K, VOCABULARY = 4, 100


class Scripted:
    """Drafts `tokens` for every request, all at survival 0.9, and writes down what it is told."""

    def __init__(self, tokens: Sequence[int] = (1, 2, 3, 4)) -> None:
        self.script = list(tokens)
        self.opened: dict[str, tuple[int, list[int], str]] = {}
        self.closed: dict[int, bool] = {}
        self.extended: list[tuple[int, list[int]]] = []
        self.verdicts: list[tuple[int, int]] = []
        self.looked = 0
        self.survival = 0.9

    def open_request(
        self,
        request_id: str,
        prompt_tokens: NDArray[np.int32],
        tenant: str = "",
        *,
        temperature: float = 0.0,
    ) -> int:
        if request_id == "compile":
            return -1
        handle = len(self.opened)
        self.opened[request_id] = (handle, prompt_tokens.tolist(), tenant)
        return handle

    def extend(self, handle: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        if handle < 0:
            return
        self.extended.append((handle, list(map(int, tokens))))

    def extend_many(
        self, handles: Sequence[int], tokens: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> None:
        for handle, end, count in zip(handles, np.cumsum(counts), counts, strict=True):
            self.extend(handle, tokens[end - count : end])

    def draft_many(self, handles: Sequence[int], max_tokens: int | NDArray[np.int32]) -> DraftBatch:
        self.looked += max(handles) >= 0
        n = len(handles)
        lengths = np.minimum(len(self.script), np.asarray(max_tokens, np.int32))
        lengths = np.where(np.array(handles) >= 0, lengths, 0).astype(np.int32)
        zeros = np.zeros(n, np.int32)
        return DraftBatch(
            np.tile(np.array(self.script, np.int32), (n, 1)),
            np.full((n, len(self.script)), self.survival, np.float32),
            lengths,
            zeros,
            zeros,
        )

    def feedback_many(
        self, batch: DraftBatch, offered_k: NDArray[np.int32], accepted_k: NDArray[np.int32]
    ) -> None:
        verdicts = zip(batch.lengths, offered_k.tolist(), accepted_k.tolist(), strict=True)
        self.verdicts += [(offered, accepted) for length, offered, accepted in verdicts if length]

    def close_request(self, handle: int, *, keep: bool = True) -> None:
        if handle >= 0:
            self.closed[handle] = keep


class Engine:
    """Requests of a pretended engine, each a text that grows."""

    def __init__(
        self,
        drafter: Any = None,
        mode: str = f"static:{K}",
        *,
        controls: bool = False,
        **facts: Any,
    ) -> None:
        self.memory = drafter or Scripted()
        self.planner = DraftPlanner(controls=controls)
        self.planner.mode = DraftMode.parse(mode)
        self.session = SpeculationSession(
            self.memory,
            self.planner,
            draft_tokens=K,
            model_tokens=50,
            step_tokens=64,
            vocabulary=VOCABULARY,
        )
        self.texts: dict[str, list[int]] = {}
        self.facts = facts
        self.now_s, self.drafted = 0.0, 0

    def step(
        self,
        emitted: dict[str, list[int]],
        finished: Sequence[str] = (),
        drafted: int | None = None,
        seconds: float = 0.1,
        kv_headroom: NDArray[np.int64] | None = None,
    ) -> dict[str, list[int]]:
        """One step in which these requests emit these tokens; the drafts that follow."""
        ids = list(emitted)
        for request_id in ids:
            self.texts.setdefault(request_id, [9, 8, 7])
        drafted = self.drafted if drafted is None else drafted
        self.session.begin(len(ids) + drafted, drafted, ids, finished, self.now_s)
        self.now_s += seconds
        table = np.zeros((len(ids), 64), np.int64)
        for row, request_id in enumerate(ids):
            self.texts[request_id] += emitted[request_id]
            table[row, : len(self.texts[request_id])] = self.texts[request_id]
        rows = BatchRows(
            ids,
            [emitted[request_id] for request_id in ids],
            np.array([len(self.texts[request_id]) for request_id in ids]),
            table,
            kv_headroom,
        )
        drafts = self.session.propose(rows, lambda request_id: RequestInfo(3, **self.facts))
        return dict(zip(ids, drafts, strict=True))


# Calls of the memory


def test_a_request_is_opened_with_its_prompt_and_extended_by_what_it_emits() -> None:
    engine = Engine(tenant="blue")
    engine.step({"a": [5]})
    engine.step({"a": [6, 7]})
    assert engine.memory.opened == {"a": (0, [9, 8, 7], "blue")}
    assert engine.memory.extended == [(0, [5]), (0, [6, 7])]


def test_a_row_whose_prompt_is_still_computed_gets_no_draft_and_is_not_opened() -> None:
    engine = Engine()
    assert engine.step({"a": [], "b": [5]}) == {"a": [], "b": [1, 2, 3, 4]}
    assert list(engine.memory.opened) == ["b"]


def test_a_request_that_was_preempted_goes_on_where_it_was() -> None:
    engine = Engine()
    engine.step({"a": [5], "b": [5]})
    engine.step({"b": [6]})
    engine.step({"a": [6]})
    assert engine.memory.extended == [(0, [5]), (1, [5]), (1, [6]), (0, [6])]


@pytest.mark.parametrize(
    ("emitted", "verdict"),
    [
        ([1, 2, 3, 4, 50], (4, 4)),
        ([1, 2, 50], (3, 2)),
        ([50], (1, 0)),
        ([1], (1, 1)),
        ([1, 2], (2, 2)),
    ],
    ids=["all", "two and a refusal", "refused", "cut to nothing, then right", "cut short"],
)
def test_a_draft_is_judged_by_the_text(emitted: list[int], verdict: tuple[int, int]) -> None:
    engine = Engine()
    engine.step({"a": [5]})
    engine.step({"a": emitted})
    assert engine.memory.verdicts == [verdict]


def test_a_draft_of_a_missing_row_is_not_judged() -> None:
    engine = Engine()
    engine.step({"a": [5], "b": [5]})
    engine.step({"b": [1, 50]}, finished=["a"])
    assert engine.memory.verdicts == [(0, 0), (2, 1)]


def test_an_ended_request_is_closed_and_kept() -> None:
    engine = Engine()
    engine.step({"a": [5]})
    engine.step({"b": [5]}, finished=["a", "never seen"])
    assert engine.memory.closed == {0: True}


def test_drafts_are_made_for_a_request_whose_answer_is_not_kept() -> None:
    engine = Engine(keeps=False)
    engine.step({"a": [5]})
    engine.step({"b": [5]}, finished=["a"])
    assert set(engine.memory.opened) == {"a", "b"}
    assert engine.memory.closed == {0: False}


def test_a_request_that_opted_out_is_neither_drafted_for_nor_kept() -> None:
    engine = Engine(drafts=False)
    assert engine.step({"a": [5]}) == {"a": []}
    engine.step({"b": [5]}, finished=["a"])
    assert engine.memory.opened == {}
    assert engine.memory.closed == {}


# How long drafts may be


def test_a_draft_ends_before_the_requests_last_token() -> None:
    engine = Engine(max_tokens=4)
    assert engine.step({"a": [5]}) == {"a": [1, 2]}
    assert engine.step({"a": [1, 2]}) == {"a": []}


def test_a_draft_ends_before_the_longest_sequence() -> None:
    engine = Engine()
    engine.texts["a"] = list(range(46))
    assert engine.step({"a": [5]}) == {"a": [1, 2]}


def test_a_draft_fits_the_kv_blocks_that_there_are() -> None:
    engine = Engine()
    drafts = engine.step({"a": [5], "b": [5]}, kv_headroom=np.array([1, 0]))
    assert drafts == {"a": [1], "b": []}


def test_a_row_may_fill_its_own_block_when_no_other_is_free() -> None:
    num_tokens, blocks = np.array([15, 16, 3]), np.array([1, 1, 1])
    assert kv_headroom(num_tokens, [blocks], [16], 2, 8) is None
    room = kv_headroom(num_tokens, [blocks], [16], 1, 8)
    assert room is not None
    assert room.tolist() == [1, 0, 13]


def test_a_draft_takes_blocks_of_each_cache_group() -> None:
    num_tokens, blocks = np.array([15, 16, 3]), np.array([1, 1, 1])
    groups = [blocks, blocks, np.array([1, 2, 1])]
    assert kv_headroom(num_tokens, groups, [16, 16, 16], 5, 8) is None
    room = kv_headroom(num_tokens, groups, [16, 16, 16], 4, 8)
    assert room is not None and room.tolist() == [1, 0, 13]


def test_an_invalid_token_ends_a_draft() -> None:
    assert Engine(Scripted([1, VOCABULARY, 2])).step({"a": [5]}) == {"a": [1]}
    assert Engine(Scripted([-1, 2])).step({"a": [5]}) == {"a": []}


# Observations of the planner


def test_a_step_lasts_until_the_next_one_begins() -> None:
    engine = Engine()
    engine.step({"a": [5], "b": [5]}, seconds=0.25)
    engine.step({"a": [1, 2, 3], "b": [5]}, drafted=8, seconds=0.5)
    engine.step({"a": [6], "b": [6]})
    assert engine.planner.counts["steps"] == 2
    assert engine.planner.counts["drafted_tokens"] == 8
    assert engine.planner.counts["accepted_tokens"] == 2


def test_the_time_between_two_requests_is_no_steps_time() -> None:
    engine = Engine()
    engine.step({"a": [5]}, seconds=60.0)
    engine.step({"b": [5]}, finished=["a"])
    assert engine.planner.counts["steps"] == 0


def test_a_draft_that_was_not_verified_is_still_judged() -> None:
    engine = Engine(mode="auto")
    for _ in range(2000):
        engine.planner.record_survival(np.zeros((1, 1), np.float32), np.ones(1, np.int32))
    engine.memory.survival = 0.0
    for _ in range(40):
        assert engine.step({"a": [1]}) == {"a": []}
    assert engine.memory.looked == 2
    assert engine.memory.verdicts == [(1, 1)] * 2


def test_a_control_step_is_observed_with_its_probability() -> None:
    engine = Engine(mode="auto", controls=True)
    told: list[StepRecord] = []
    engine.planner.observe = told.append  # type: ignore[method-assign]
    for number in range(200):
        name = f"request {number // 20}"
        engine.drafted = len(engine.step({name: [1]})[name])
    tossed = [step for step in told if step.control_draw is not None]
    assert len(tossed) > 150
    assert all(
        step.control_draw.is_control is (step.drafted == 0) for step in tossed if step.control_draw
    )
    assert {step.control_draw.probability for step in tossed if step.control_draw} == {
        CONTROL_WHILE_UNDECIDED
    }


# SpeculationSettings


def test_engine_arguments_name_proposer_and_draft_tokens() -> None:
    arguments = engine_arguments(12, mode="off")
    assert arguments["speculative_config"]["num_speculative_tokens"] == 12
    assert arguments["additional_config"] == {CONFIG_KEY: {"mode": "off"}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "sometimes"}, "expected auto, off or static:K"),
        ({"modes": "auto"}, "unknown field `modes`"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SpeculationSettings.read(settings)


def test_a_client_cannot_name_its_tenant_but_may_opt_out() -> None:
    sent = {REQUEST_KEY: {"tenant": "mallory"}, OPT_OUT_KEY: 0, "kept": 1}
    told = request_arguments(sent, tenant="blue", itl_s=0.05)
    assert told["kept"] == 1
    facts = parse_request_info(7, 20, told)
    assert (facts.tenant, facts.drafts, facts.itl_s, facts.max_tokens) == ("blue", False, 0.05, 20)
    refused = request_arguments({OPT_OUT_KEY: 1}, tenant="blue", drafts=False)
    assert not parse_request_info(7, None, refused).drafts


@pytest.mark.parametrize("itl_s", [None, "soon", -1, float("nan"), 0])
def test_a_target_that_is_none_is_left_out(itl_s: Any) -> None:
    assert parse_request_info(1, None, {REQUEST_KEY: {"itl_s": itl_s}}).itl_s == float("inf")


# The proposer


def proposer(**settings: Any) -> HeadraceProposer:
    return HeadraceProposer(
        SimpleNamespace(
            additional_config={CONFIG_KEY: settings},
            scheduler_config=SimpleNamespace(
                max_num_scheduled_tokens=None, max_num_batched_tokens=64, max_num_seqs=5
            ),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=None),
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
            model_config=SimpleNamespace(
                max_model_len=50,
                get_vocab_size=lambda: VOCABULARY,
                model="m",
                revision=None,
                dtype="float32",
                quantization=None,
                tokenizer="t",
                tokenizer_revision=None,
            ),
        )
    )


class OneRow:
    """An engine with one request; its text repeats, so that there is something to draft."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def rows(self, sampled: Any, num_tokens: Any, token_ids: Any, scheduled: Any) -> BatchRows:
        if self.broken:
            raise RuntimeError("a bug")
        return BatchRows(["a"], sampled, num_tokens, token_ids)

    def request_info(self, request_id: str) -> RequestInfo:
        return RequestInfo(prompt_tokens=11)


TEXT = np.array([[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6] + [0] * 20])


def propose(told: HeadraceProposer) -> list[list[int]]:
    told.begin_step({"a": 1}, {}, set())
    return told.propose([[6]], np.array([12]), TEXT)


def test_an_unbound_proposer_drafts_nothing() -> None:
    assert propose(proposer(mode="static:4")) == [[]]


def test_a_bound_one_drafts_from_the_requests_own_text() -> None:
    told = proposer(mode="static:4")
    told.bind(OneRow())
    assert propose(told) == [[1, 2, 3, 4]]


def test_a_memory_is_shared_from_the_time_that_the_engine_is_there(tmp_path: Path) -> None:
    told = proposer(
        mode="static:4",
        replication={"store": "none", "socket_folder": str(tmp_path), "poll_s": 0.01},
    )
    assert told.replicator is not None
    assert told.command({})["replication"]["state"] == "not started"
    told.bind(OneRow())
    try:
        until(lambda: told.command({})["replication"]["state"] == "away")
        assert propose(told) == [[1, 2, 3, 4]]
    finally:
        told.replicator.close()


def test_a_failure_costs_one_steps_drafts_and_many_stop_speculation_until_the_mode_is_set() -> None:
    told, engine = proposer(mode="static:4"), OneRow(broken=True)
    told.bind(engine)
    assert propose(told) == [[]]
    engine.broken = False
    assert propose(told) == [[1, 2, 3, 4]]
    engine.broken = True
    for _ in range(MAX_FAILURES):
        assert propose(told) == [[]]
    engine.broken = False
    assert propose(told) == [[]]
    told.command({"mode": "static:2"})
    assert propose(told) == [[1, 2]]
    assert told.command({})["failures"] == MAX_FAILURES + 1


@pytest.mark.parametrize(
    "command",
    [{"mode": "on"}, {"draft_cap": -1}, {"draft_cap": "3"}, {"x": 1}],
)
def test_a_wrong_command_changes_nothing(command: dict[str, Any]) -> None:
    told = proposer()
    with pytest.raises(ValueError):
        told.command({"draft_cap": 5, **command})
    assert told.command({})["draft_cap"] is None


def test_wrong_options_of_the_memory_end_the_start() -> None:
    with pytest.raises(ValueError, match=rf"{CONFIG_KEY}\.drafter_options: .*'size'"):
        proposer(drafter_options={"size": 1})

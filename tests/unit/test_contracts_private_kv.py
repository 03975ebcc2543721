"""What is exact of a request's KV is shared, in the engine and in the store; the rest is its own.

vLLM's own scheduler and both halves of the store's connector; nobody computes. Where vLLM moves,
mend `engine/headrace_engine/vllm/private_blocks.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from headrace_decode.resume.scheduler import RESUME_TOKENS
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.kv_transfer.handoff import BLENDED_KEY, BLENDING_KEY
from headrace_engine.vllm.private_blocks import keep_private
from headrace_kvstore.identity.private_blocks import is_private, private_name, shared_blocks
from headrace_prefill.blending.engine.connector import BlendingConnector
from headrace_prefill.blending.engine.stored_connector import StoredBlendingConnector
from tests.support.scheduled import BLOCK, Scheduled

PROMPT = 3 * BLOCK + 40
ANSWER = 2 * BLOCK


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Scheduled]:
    made = Scheduled(tmp_path, scheduler=ExtensibleScheduler)
    yield made
    made.close()


def serve(engine: Scheduled, request: Request) -> Request:
    engine.until(lambda: request.is_finished() and not engine.connector.scheduler.busy)
    return request


def stored(engine: Scheduled) -> int:
    """Blocks in the store."""
    return int(engine.connector.arena.stats()["blocks"])


def found(engine: Scheduled, request: Request) -> int:
    """Blocks that the next request with these tokens gets from the engine's cache."""
    tokens = [*request.all_token_ids, 7, 8, 9]
    engine.steps.clear()
    serve(engine, engine.add(f"after {request.request_id}", tokens, 1))
    computed = sum(sum(step.values()) for step in engine.steps)
    return (len(tokens) - computed) // BLOCK


@pytest.mark.parametrize("extra", [{"sparse": 0.1}, {"compression": 0.25}])
def test_a_prompt_is_shared_and_stored_and_its_approximate_answer_is_not(
    engine: Scheduled, extra: dict[str, float]
) -> None:
    asked = serve(engine, engine.add("one", PROMPT, ANSWER, extra))
    assert [is_private(h) for h in asked.block_hashes] == [False] * 3 + [True] * 2
    assert stored(engine) == 3
    assert found(engine, asked) == 3


@pytest.mark.parametrize("extra", [None, {"sparse": 1}, {"other": 0.5}])
def test_an_exact_request_shares_its_answer(engine: Scheduled, extra: Any) -> None:
    asked = serve(engine, engine.add("one", PROMPT, ANSWER, extra))
    assert stored(engine) == 5 and found(engine, asked) == 5


def test_a_sparse_request_gets_what_others_computed_and_stored(engine: Scheduled) -> None:
    engine.served("first", PROMPT)
    engine.steps.clear()
    serve(engine, engine.add("sparse", PROMPT, 2, {"sparse": 0.1}))
    assert engine.steps[0] == {"sparse": 40}, "from the store"
    engine.steps.clear()
    serve(engine, engine.add("other share", PROMPT, 2, {"sparse": 0.2}))
    assert engine.steps[0] == {"other share": 40}, "from the cache"


def test_a_prompt_that_ends_with_a_block_is_shared_as_a_whole(engine: Scheduled) -> None:
    asked = serve(engine, engine.add("one", 3 * BLOCK, BLOCK + 1, {"sparse": 0.1}))
    assert [is_private(h) for h in asked.block_hashes] == [False] * 3 + [True]


def test_what_was_said_elsewhere_is_private_too(engine: Scheduled) -> None:
    extra = {"sparse": 0.1, RESUME_TOKENS: [5] * BLOCK}
    asked = serve(engine, engine.add("one", 3 * BLOCK, BLOCK + 9, extra))
    assert [is_private(h) for h in asked.block_hashes] == [False] * 3 + [True]


def test_it_meets_its_own_blocks_again_after_a_preemption(engine: Scheduled) -> None:
    asked = engine.add("one", PROMPT, ANSWER, {"sparse": 0.1})
    engine.until(lambda: asked.num_output_tokens == BLOCK)
    names = list(asked.block_hashes)
    scheduler = engine.scheduler
    scheduler.running.remove(asked)
    scheduler._preempt_request(asked, 0.0)
    engine.steps.clear()
    engine.step()
    assert engine.steps[0]["one"] < BLOCK and list(asked.block_hashes)[: len(names)] == names
    serve(engine, asked)


def test_no_two_requests_have_a_private_block_in_common(engine: Scheduled) -> None:
    first, second = (
        serve(engine, engine.add(name, PROMPT, ANSWER, {"sparse": 0.1})) for name in "ab"
    )
    assert first.block_hashes[:3] == second.block_hashes[:3]
    assert not {*first.block_hashes[3:]} & {*second.block_hashes[3:]}


def test_names_tell_how_many_first_blocks_are_shared() -> None:
    mine, hashes = b"x" * 16, [b"h" * 32, b"i" * 32]
    names = [*hashes, *(private_name(mine, n) for n in range(2, 9))]
    assert [shared_blocks(names[:n]) for n in range(len(names) + 1)] == [0, 1] + [2] * 8
    assert shared_blocks(names[2:]) == 0
    assert len({name[-8:] for name in names}) == len(names), "gateways know blocks by 8 bytes"
    assert {len(name) for name in names} == {32}


def test_without_prefix_caching_nothing_is_done() -> None:
    request: Any = SimpleNamespace(_block_hasher=None, block_hashes=[])
    keep_private(request)
    assert request._block_hasher is None


def test_vllm_names_new_blocks_by_the_requests_own_hasher() -> None:
    source = inspect.getsource(Request.update_block_hashes)
    assert "self.block_hashes.extend(self._block_hasher(self))" in source


class Reusing(StoredBlendingConnector):
    """The scheduler half, without a store."""

    def __init__(self) -> None:
        self._block_tokens = BLOCK
        self._found: dict[str, Any] = {}
        self._served: set[str] = set()
        self._sources: dict[str, int] = {}
        self._loading: dict[str, Any] = {}
        self._blended: set[str] = set()
        self._begin: list[Any] = []


def reusing(
    engine: Scheduled, runs: list[list[Any]], invalid: set[int], **params: Any
) -> tuple[Reusing, Request]:
    """A request that loads such runs, once the load has ended."""
    connector = Reusing()
    extra = {"kv_transfer_params": {BLENDING_KEY: {"runs": runs}, **params}}
    asked = engine.add("r", PROMPT, 2, extra)
    engine.scheduler.finish_requests("r", asked.status.FINISHED_ABORTED)
    connector._found["r"] = {"runs": runs}
    blocks = SimpleNamespace(get_block_ids=lambda: [[11, 12, 13, 14]])
    connector.update_state_after_alloc(asked, blocks, PROMPT - 1)
    ended = KVConnectorOutput(finished_recving={"r"}, invalid_block_ids=invalid)
    connector.update_connector_output(KVConnectorOutput(finished_recving={"another"}))
    connector.update_connector_output(ended)
    return connector, asked


@pytest.mark.parametrize(
    ("runs", "exact"),
    [
        ([[5, 9, 300]], 0),
        ([[0, 9, 300]], 0),
        ([[0, 0, 300], [310, 4, 60]], 2),
        ([[0, 0, 2 * BLOCK], [310, 4, 60]], 2),
    ],
)
def test_reused_kv_is_private_from_the_first_block_that_is_not_exact(
    engine: Scheduled, runs: list[list[Any]], exact: int
) -> None:
    _, asked = reusing(engine, runs, set())
    assert shared_blocks(asked.block_hashes) == exact and len(asked.block_hashes) == 3
    asked.append_output_token_ids([1] * BLOCK)
    assert shared_blocks(asked.block_hashes) == exact and len(asked.block_hashes) == 4


def test_a_load_that_fails_leaves_the_request_as_any_other(engine: Scheduled) -> None:
    connector, asked = reusing(engine, [[5, 9, 300]], {13}, do_remote_decode=True)
    assert shared_blocks(asked.block_hashes) == 3
    assert connector.request_finished(asked, []) == (False, None)


def test_who_pulls_reused_kv_is_told_and_keeps_all_of_it_private(engine: Scheduled) -> None:
    connector, asked = reusing(engine, [[0, 0, 300]], set(), do_remote_decode=True)
    _, told = connector.request_finished(asked, [])
    assert told == {BLENDED_KEY: True}
    extra = {"kv_transfer_params": {"do_remote_prefill": True, **told}}
    pulls = engine.add("p", PROMPT, 2, extra)
    BlendingConnector.on_new_request(connector, pulls)
    assert shared_blocks(pulls.block_hashes) == 0


def test_who_computes_its_own_prompt_tells_nobody(engine: Scheduled) -> None:
    connector, asked = reusing(engine, [[5, 9, 300]], set())
    assert connector.request_finished(asked, []) == (False, None)


def test_an_engine_of_several_cache_groups_blends_nothing() -> None:
    connector, asked = Reusing(), SimpleNamespace(request_id="r", num_tokens=PROMPT)
    connector.find = lambda *_: {"runs": [[0, 0, 300]]}  # type: ignore[method-assign]
    found = []
    for connector._has_one_group in (True, False):
        found.append(connector.get_num_new_matched_tokens(asked, 0))
    assert found == [(PROMPT - 1, True), (0, False)]

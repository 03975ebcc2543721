"""Which prompts reuse stored KV at other places, and whose."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import pytest

from headrace_decode.planning.blending_planner import (
    LAST_TOKENS,
    MAX_COST_RATIO,
    BlendingPlanner,
    is_exact,
    last_rows_of,
    pays,
    rows_of,
)
from headrace_decode.techniques import (
    RequestedTechniques,
    TechniqueError,
    applied_techniques,
    offered_techniques,
    recompute_ratio,
    requested_techniques,
)
from headrace_prefill.blending.finding.finder import Finder, Run

BLOCK = 16


def hashes(token_ids: Sequence[int], salt: str) -> list[bytes]:
    ids, chain, found = np.asarray(token_ids, np.int32), salt.encode(), []
    for at in range(0, len(ids) - BLOCK + 1, BLOCK):
        chain = sha256(chain + ids[at : at + BLOCK].tobytes()).digest()
        found.append(chain)
    return found


def reusing(mode: str = "auto") -> BlendingPlanner:
    return BlendingPlanner(Finder(100_000, BLOCK), hashes, mode, 0.15)


def words(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 10_000, count).tolist()
    return found


def run(new: int, length: int, old: int = 5) -> Run:
    return Run(new, old, length, (), 0)


async def test_a_document_at_another_place_is_reused_under_a_salt_of_its_own() -> None:
    one, document = reusing(), words(800, 1)
    await one.record_prompt("ann", [*words(37, 2), *document])
    prompt = [*words(100, 3), *document, *words(40, 4)]
    found = [await one.plan("ann", prompt, 0.3) for _ in range(2)]
    assert found[0] is not None and found[1] is not None
    assert found[0].salt != found[1].salt
    assert found[0].salt.startswith("technique:blending-") and found[0].salt.endswith(":ann")
    [[new, old, length, offset, digests]] = found[0].params["runs"]
    assert (new, old, offset) == (100, 37, 37 % BLOCK)
    assert length >= 800 - BLOCK  # the stored prompt's last tokens fill no block
    stored = hashes([*words(37, 2), *document], "ann")
    assert digests == b"".join(stored[37 // BLOCK : (37 + length - 1) // BLOCK + 1])
    assert found[0].params["last"] == len(prompt) - LAST_TOKENS
    assert found[0].params["recompute_ratio"] == 0.3
    assert 0.3 * length < found[0].computed < len(prompt) * MAX_COST_RATIO
    assert (one.requests, one.blended_tokens) == (0, 0)
    found[0].was_blended = True
    await one.on_finished("ann", prompt, found[0])
    assert (one.requests, one.blended_tokens) == (1, length)


async def test_runs_that_this_machines_store_has_not_count_as_not_found() -> None:
    one, documents = reusing(), [words(800, seed) for seed in (1, 2)]
    for document in documents:
        await one.record_prompt("ann", [*words(37, 5), *document])
    prompt = [*words(100, 3), *documents[0], *words(40, 4), *documents[1], *words(9, 6)]
    gone = set(hashes([*words(37, 5), *documents[0]], "ann")[4:6])
    one.holds_blocks = lambda blocks: [block not in gone for block in blocks]
    found = await one.plan("ann", prompt, 0.3)
    assert found is not None
    assert [run[0] for run in found.params["runs"]] == [940]
    one.holds_blocks = lambda blocks: [False] * len(blocks)
    assert await one.plan("ann", prompt, 0.3) is None, "it is served as if it had not asked"


async def test_a_prompt_that_was_to_reuse_and_did_not_is_remembered() -> None:
    one, document = reusing(), words(800, 1)
    await one.record_prompt("ann", document)
    prompt = [*words(100, 3), *document]
    for happened in (True, False):
        reuse = await one.plan("ann", prompt, 0.3)
        assert reuse is not None, "what reused is not remembered"
        reuse.was_blended = happened
        await one.on_finished("ann", prompt, reuse)
    assert await one.plan("ann", prompt, 0.3) is None, "all of it is an exact prefix"
    assert one.requests == 1


async def test_nothing_of_another_salt_is_reused() -> None:
    one, document = reusing(), words(800, 1)
    await one.record_prompt("ann", document)
    assert await one.plan("bob", [*words(100, 3), *document], 0.3) is None


async def test_an_exact_prefix_alone_is_left_to_prefix_caching() -> None:
    one, document = reusing(), words(800, 1)
    await one.record_prompt("ann", document)
    assert await one.plan("ann", [*document, *words(300, 3)], 0.15) is None


async def test_a_short_prompt_is_not_looked_up() -> None:
    assert await reusing().plan("ann", words(100, 1), 0.15) is None


async def test_a_long_prompt_is_looked_up_in_a_thread() -> None:
    one, document = reusing(), words(6000, 1)
    await one.record_prompt("ann", document)
    assert await one.plan("ann", [*words(50, 2), *document], 0.15) is not None


def test_an_exact_run_stands_first_in_both_prompts() -> None:
    assert is_exact(run(0, 10, old=0))
    assert not is_exact(run(0, 10, old=3))
    assert not is_exact(run(3, 10, old=0))


def test_reuse_pays_up_to_its_share_of_the_rows() -> None:
    tokens, last = 1000, 1000
    runs = [run(0, 500)]
    rows = 500 + 0.15 * 500 + 500 / 50
    assert rows <= MAX_COST_RATIO * tokens
    assert rows_of(tokens, runs, last, 0.15) == rows
    assert pays(tokens, runs, rows)
    assert not pays(tokens, runs, rows_of(tokens, runs, last, 0.7))
    alone = [run(0, 500, old=0)]
    assert not pays(tokens, alone, rows_of(tokens, alone, last, 0.15))
    # What the exact prefix saves anyway is no gain of reuse.
    mostly = [run(0, 700, old=0), run(700, 30)]
    assert not pays(tokens, mostly, rows_of(tokens, mostly, last, 0.15))


def test_the_last_tokens_behind_the_last_run_are_probed() -> None:
    assert last_rows_of(500, [run(100, 397)]) == 497
    assert last_rows_of(500, []) == 501 - LAST_TOKENS
    assert last_rows_of(500, [run(100, 50)]) == 501 - LAST_TOKENS


@pytest.mark.parametrize(
    ("extra", "mode", "share"),
    [
        (None, "auto", 0.15),
        (None, "request", None),
        ({"blending": "auto"}, "request", 0.15),
        ({"blending": 0.4}, "request", 0.4),
        ({"blending": 1}, "auto", 1.0),
        ({"blending": "off"}, "auto", None),
        ({"blending": "auto"}, "off", None),
        ({"blending": "auto", "techniques": "off"}, "auto", None),
    ],
)
def test_request_and_app_agree_on_reuse(
    extra: dict[str, object] | None, mode: str, share: float | None
) -> None:
    assert recompute_ratio(extra, mode, 0.15) == share


@pytest.mark.parametrize("value", [0, -1, 1.01, float("nan"), True, "some", [0.1], {}])
def test_what_is_no_share_is_refused(value: object) -> None:
    for mode in ("off", "auto"):
        with pytest.raises(TechniqueError) as error:
            recompute_ratio({"blending": value}, mode, 0.15)
        assert error.value.param == "vllm_xargs.blending"


def test_an_answer_tells_of_reuse_where_it_could_be() -> None:
    said = ({"vllm_xargs": {"blending": reuse}} for reuse in ("auto", "off", None))
    asks, refuses, silent = (requested_techniques(request) for request in said)
    assert [each.blending for each in (asks, refuses, RequestedTechniques(), silent)] == [
        True,
        False,
        None,
        None,
    ]
    offer = offered_techniques("store=int4", {"blending": "request"})
    assert offer == "store=int4, blending=request"
    assert applied_techniques(asks, offer) == "store=int4, blending"
    assert applied_techniques(silent, offer) == "store=int4"
    auto = offered_techniques("", {"blending": "auto"})
    assert [applied_techniques(each, auto) for each in (silent, refuses)] == ["blending", "exact"]
    assert applied_techniques(RequestedTechniques(exact=True, blending=True), auto) == "exact"
    assert offered_techniques("", {"blending": "off"}) == ""

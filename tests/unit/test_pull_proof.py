"""Whose KV a hand-out is, which records are kept of it, and which bytes count as the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.planning.verification_policy import REQUIRED_CORRECT, VerificationPolicy
from headrace_engine.pull_events import seconds_by_event, transfers_by_event
from headrace_engine.pull_proof.content import BlockSums, block_seeds
from headrace_engine.pull_proof.identity import (
    NO_SUMS,
    PARAMS_KEY,
    RECORD_BYTES,
    SUMMED,
    UNSUMMED,
    Claim,
    Identity,
    Unproved,
    believe,
    prompt_digest,
    read_claim,
)
from headrace_engine.pull_proof.records import MIN_ROWS, Geometry, Grants, RecordTable
from headrace_engine.pull_proof.settings import IntegritySettings, Sampling

WHO = Identity(b"i" * 16, 7, prompt_digest(b"m", "s", b"", [1, 2, 3]), 3, True)
BLOCKS = [[4, 9]]
GOOD = Claim(WHO, {(0, 0): 4096}, WHO.proof(BLOCKS))


# Identity


def test_a_record_is_believed_for_its_hand_out_only() -> None:
    for state in (UNSUMMED, SUMMED, NO_SUMS):
        assert believe(WHO, WHO.record(state)) == state
    others = {
        "restarted": replace(WHO, incarnation=b"j" * 16),
        "reused": replace(WHO, generation=8),
        "prompt": replace(WHO, digest=b"d" * 16),
        "unknown": replace(WHO, checked=False),
    }
    for kind, other in others.items():
        with pytest.raises(Unproved) as wrong:
            believe(WHO, other.record())
        assert wrong.value.kind == kind
    with pytest.raises(Unproved) as wrong:
        believe(replace(WHO, tokens=2), WHO.record())
    assert wrong.value.kind == "prompt"


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_other_bytes_are_never_believed(found: bytes) -> None:
    with pytest.raises(Unproved):
        believe(WHO, found)
    with pytest.raises(Unproved, match="no more"):
        believe(WHO, bytes(RECORD_BYTES))


@given(st.integers(0, 8 * 52 - 1))
def test_a_torn_record_is_not_believed(bit: int) -> None:
    torn = bytearray(WHO.record())
    torn[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Unproved):
        believe(WHO, bytes(torn))


def test_whatever_kv_depends_on_makes_another_digest() -> None:
    known = (b"m", "s", b"a", (1, 2, 3))
    others = [
        *[(b"n", "s", b"a", (1, 2, 3)), (b"m", "t", b"a", (1, 2, 3))],
        *[(b"m", "s", b"b", (1, 2, 3)), (b"m", "sa", b"", (1, 2, 3))],
        *[(b"m", "s", b"a", (1, 2)), (b"m", "s", b"a", (1, 2, 4))],
    ]
    assert len({prompt_digest(*one) for one in [known, *others]}) == 1 + len(others)


def test_a_claim_travels_and_is_tied_to_prompt_and_blocks() -> None:
    came = read_claim({PARAMS_KEY: GOOD.params(), "remote_block_ids": BLOCKS})
    assert came.own(WHO.digest, BLOCKS) == GOOD
    for digest, blocks in [(b"d" * 16, BLOCKS), (WHO.digest, [[9, 4]]), (WHO.digest, [[4], [9]])]:
        with pytest.raises(Unproved) as wrong:
            came.own(digest, blocks)
        assert wrong.value.kind == "reference"


@pytest.mark.parametrize(
    "differs",
    [
        *[{"incarnation": "zz"}, {"incarnation": "00"}, {"generation": -1}, {"generation": 2**70}],
        *[{"tokens": None}, {"places": []}, {"places": [[0, 0, 0]]}, {"places": [[0, 0]]}],
        *[{"places": [[0, r, 1] for r in range(5000)]}, {"proof": ""}, {"proof": 3}],
    ],
    ids=str,
)
def test_a_claim_that_cannot_be_read_is_refused(differs: dict[str, Any]) -> None:
    with pytest.raises(Unproved) as wrong:
        read_claim({PARAMS_KEY: {**GOOD.params(), **differs}})
    assert wrong.value.kind == "unknown"
    for params in ({}, {PARAMS_KEY: None}, {PARAMS_KEY: [1]}):
        with pytest.raises(Unproved, match="no identity"):
            read_claim(params)


# Records


def test_generations_are_used_once_and_rows_again() -> None:
    grants = Grants(2, b"i" * 16, Sampling(IntegritySettings(check="off")))
    first, second = (grants.begin(name, b"d" * 16, 1) for name in "ab")
    assert first is not None and second is not None
    assert grants.begin("a", b"d" * 16, 1) == first, "asked again after a preemption"
    assert grants.begin("c", b"d" * 16, 1) is None, "no row is free"
    assert grants.end("a") == first[0]
    assert grants.end("a") is None
    third = grants.begin("c", b"d" * 16, 1)
    assert third is not None and third[0] == first[0]
    assert [g[1].generation for g in (first, second, third)] == [1, 2, 3]


def test_fingerprints_of_a_hand_out_that_has_ended_are_not_published() -> None:
    table = RecordTable(Geometry.of(256, 128))
    table.write(1, WHO.record())
    sums = np.array([5, 6], np.uint64)
    assert table.put_sums(1, WHO.generation, sums)
    assert believe(WHO, table.row(1)[:RECORD_BYTES]) == SUMMED
    assert np.frombuffer(table.row(1)[RECORD_BYTES:], np.uint64)[:2].tolist() == [5, 6]
    table.erase(1)
    assert not table.put_sums(1, WHO.generation, sums)
    table.write(1, replace(WHO, generation=8).record())
    assert not table.put_sums(1, WHO.generation, sums)
    assert table.put_sums(1, 8, None)
    assert believe(replace(WHO, generation=8), table.row(1)[:RECORD_BYTES]) == NO_SUMS


@pytest.mark.parametrize("longest, block", [(2048, 128), (131_072, 16), (100, 32)])
def test_a_row_has_room_for_the_longest_prompt(longest: int, block: int) -> None:
    geometry = Geometry.of(longest, block)
    assert geometry.sums >= -(-longest // block)
    assert geometry.rows >= MIN_ROWS
    assert geometry.nbytes <= 2**24 or geometry.rows == MIN_ROWS


# Which are checked


def test_a_sample_a_demand_and_all() -> None:
    drawn = Sampling(IntegritySettings(rate=0.02))
    share = sum(drawn.choose(False) for _ in range(20_000)) / 20_000
    assert 0.015 < share < 0.025
    assert drawn.choose(True)
    assert Sampling(IntegritySettings(check="all")).choose(False)
    off = Sampling(IntegritySettings(check="off"))
    assert not off.choose(False) and off.choose(True)
    assert not Sampling(IntegritySettings(check="all"), possible=False).choose(True)


@pytest.mark.parametrize(
    "given", [{"check": "some"}, {"rate": 0}, {"rate": 2}, {"pull_timeout_s": 0}, {"ratio": 1}]
)
def test_settings_that_cannot_be_used_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        IntegritySettings.parse({"headrace_integrity": given})


def test_a_replica_that_was_wrong_is_distrusted_until_it_was_right_for_long() -> None:
    distrust = VerificationPolicy()
    distrust.record_correct("a")
    assert "a" not in distrust
    distrust.record_wrong("a")
    for _ in range(REQUIRED_CORRECT - 1):
        distrust.record_correct("a")
    assert "a" in distrust and "b" not in distrust
    distrust.record_correct("a")
    assert "a" not in distrust
    distrust.record_wrong("b")
    distrust.retain(frozenset({"a"}))
    assert "b" not in distrust


def test_reports_are_counted_by_event() -> None:
    report = {
        "proved": [[0.25, True], [0.5, False], [0.25, True]],
        "unproved": [["r", "e", "gone", "why"], ["q", "e", "gone", "why"]],
    }
    assert transfers_by_event(report) == {"proved": 3, "checked": 2, "unproved_gone": 2}
    assert seconds_by_event(report) == {"checked": 0.5, "identity": 0.5}
    assert transfers_by_event({}) == seconds_by_event({}) == {}


# Bytes


def test_a_fingerprint_is_of_its_bytes_place_and_hand_out() -> None:
    caches = {f"l{n}": torch.randn(4, 2, 8, 16) for n in range(3)}
    sums = BlockSums(caches, 4)
    base = sums.of([2], block_seeds(WHO, [0]))
    assert sums.of([2], block_seeds(WHO, [1])) != base
    assert sums.of([2], block_seeds(replace(WHO, generation=8), [0])) != base
    assert sums.of([3], block_seeds(WHO, [0])) != base
    assert sums.start([2], block_seeds(WHO, [0])).result() == base
    caches["l0"][2], caches["l1"][2] = caches["l1"][2].clone(), caches["l0"][2].clone()
    assert sums.of([2], block_seeds(WHO, [0])) != base, "layers that changed places"
    with pytest.raises(IndexError):
        sums.of([4], block_seeds(WHO, [0]))
    sums.close()

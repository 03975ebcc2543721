"""A real engine is given corpora while it serves: tokenised, loaded between steps, drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.model import resolve
from tests.support.corpora import corpus_session

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, Any]]:
    yield corpus_session(str(resolve("smollm2-135m-instruct")))


def test_a_corpus_is_held_from_its_flip_on(said: dict[str, Any]) -> None:
    assert said["before the flip"] == [0]
    [corpus] = said["list"]
    assert said["part"] == said["flip"] == {"tokens": corpus["tokens"]}
    assert corpus["tokens"] > 50
    assert (corpus["corpus"], corpus["tenant"], corpus["version"]) == ("c", "a", 1)


def test_it_is_drafted_for_its_tenant_alone_and_changes_no_answer(said: dict[str, Any]) -> None:
    assert said["another tenant"] == [0]
    assert said["its tenant"][0] >= 1


def test_a_large_one_is_loaded_while_requests_are_answered(said: dict[str, Any]) -> None:
    assert said["answered meanwhile"]
    assert said["large"]["tokens"] > 300_000
    assert said["large flip"] == said["large"]


def test_a_dropped_one_is_gone(said: dict[str, Any]) -> None:
    assert said["drop"] == [{"dropped": True}, {"dropped": False}]
    assert said["names"] == ["filler"]

"""What the hostile client sends is what it says."""

from __future__ import annotations

import math

import msgspec
import pytest

from benchmarks.hostile.attacks import MEGABYTE, TROUBLE, requests, wires, wrong_answer
from benchmarks.hostile.neighbour import percentile

REQUESTS = list(requests("m"))


def test_each_attack_has_a_name_of_its_own() -> None:
    names = [each.name for each in REQUESTS] + [wire.name for wire in wires("m")]
    assert len(names) == len(set(names)) >= 150


@pytest.mark.parametrize("kind", TROUBLE)
def test_each_byte_class_comes_as_a_megabyte_in_each_field(kind: str) -> None:
    sent = [each for each in REQUESTS if each.name.endswith(f": {kind}")]
    assert len(sent) >= 8
    for each in sent:
        msgspec.json.decode(each.body)
        assert len(each.body) > 0.9 * MEGABYTE, each.name


def test_an_answer_of_500_is_wrong_and_none_is_not() -> None:
    assert wrong_answer(b"HTTP/1.1 400 Bad Request\r\n") is None
    assert wrong_answer(b"") is None
    assert wrong_answer(b"HTTP/1.1 502 \r\n") == "answered 502"


def test_a_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([float(n) for n in range(100)], 0.99) == 99.0
    assert percentile([1.0], 0.5) == 1.0
    assert math.isnan(percentile([], 0.5))

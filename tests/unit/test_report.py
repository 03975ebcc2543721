"""A replica's report: what is sent is read, and what cannot be is refused by its field's name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.reporting.report import (
    MAX_BYTES,
    MAX_HEARD,
    Load,
    Mean,
    Report,
    Transfer,
    decode,
    encode,
)
from headrace_engine.step_time import StepTime
from tests.support.reports import report

FULL: dict[str, Any] = dict(
    seq=7,
    running=3,
    context=4000,
    queued_tokens=900,
    queued_pairs=405_450.0,
    free_blocks=12,
    draining=True,
    heard=("plan-1", "plan-2"),
    call=Mean(0.02, 0.01),
    handoff=Mean(0.005, 0.002),
    transfer=Transfer(0.005, 1e-9, 0.2),
    loads={"dram": Load(0.001, 1e-10), "nvme": Load(0.004, 1e-9)},
    policy="remote",
    computed_s=1.5,
)


def wire(**changes: Any) -> bytes:
    """A report with fields of any value."""
    fields = msgspec.to_builtins(report(**FULL))
    return msgspec.msgpack.encode({**fields, **changes})


def test_a_report_is_read_as_it_was_sent() -> None:
    sent = report(**FULL)
    assert decode(encode(sent)) == sent
    assert decode(encode(report())) == report()


def test_what_a_writer_leaves_out_has_its_default_and_what_a_reader_does_not_know_is_ignored() -> (
    None
):
    least = dict(
        replica="a", role="prefill", machine="m", block_tokens=1, token_bytes=1.0, step_tokens=1
    )
    got = decode(msgspec.msgpack.encode({**least, "of_next_year": [1, {"x": 2}]}))
    assert got == Report(**least)  # type: ignore[arg-type]
    assert (got.steps, got.free_blocks, got.call, got.loads) == (None, -1, None, {})


def test_step_times_go_from_one_process_to_another() -> None:
    fit = StepTime([1, 2, 4, 8])
    for rows in (1, 2, 4, 8):
        fit.observe(0, rows, 0, 100 * rows, 0, 0.01 + 0.001 * rows)
    got = decode(encode(report(steps=fit.to_dict())))
    assert got.steps is not None
    assert StepTime.from_dict(got.steps).seconds(rows=4) == fit.seconds(rows=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replica", ""),
        ("replica", "r" * 129),
        ("role", "gateway"),
        ("machine", "m" * 129),
        ("block_tokens", 0),
        ("token_bytes", 0.0),
        ("token_bytes", math.nan),
        ("step_tokens", 2**24 + 1),
        ("running", -1),
        ("context", 2**41),
        ("queued_tokens", 0.5),
        ("queued_pairs", math.inf),
        ("free_blocks", -2),
        ("heard", ["x"] * (MAX_HEARD + 1)),
        ("heard", ["x" * 129]),
        ("call", [0.1]),
        ("call", [-0.1, 0.0]),
        ("handoff", [0.1, math.nan]),
        ("transfer", [0.0, 0.0, -1.0]),
        ("loads", {"tape": [0.0, 0.0]}),
        ("loads", {"dram": [math.nan, 0.0]}),
        ("queued_pairs", -1.0),
        ("computed_s", math.nan),
        ("draining", "yes"),
        ("seq", -1),
    ],
)
def test_a_field_that_cannot_be_is_refused_and_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        decode(wire(**{field: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"state": [math.nan] * 62},
        {"state": [41.0] * 62},
        {"state": [0.0] * 300},
        {"square": math.nan},
        {"padded_sizes": [0]},
        {"padded_sizes": [1] * 5000},
        {"samples": -1},
    ],
)
def test_step_times_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="steps"):
        decode(wire(steps={**StepTime().to_dict(), **changes}))


def test_no_report_is_larger_than_the_limit() -> None:
    with pytest.raises(ValueError, match="at most"):
        decode(wire(more="x" * MAX_BYTES))
    most = ["x" * 128 for _ in range(MAX_HEARD)]
    assert len(encode(report(**{**FULL, "heard": tuple(most)}))) < MAX_BYTES


@given(st.binary(max_size=200))
def test_bytes_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_what_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError):
        decode(b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    st.sampled_from(sorted(msgspec.to_builtins(report(**FULL)))),
)
def test_any_value_in_any_field_is_read_or_refused(value: Any, field: str) -> None:
    try:
        got = decode(wire(**{field: value}))
    except ValueError as error:
        assert field in str(error) or "nested" in str(error)
    else:
        assert decode(encode(got)) == got

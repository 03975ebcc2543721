"""The lines of a batch: how a file is split, what a line must have, and what faults are called."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.batches.batch_lines import (
    MAX_FAULTS,
    LineChecker,
    LineFaultError,
    LineSplitter,
    answer_line,
    error_line,
    parse_line,
)
from tests.unit.batch_fakes import line
from tests.unit.gateway_fakes import CHAT


def raw(**changes: Any) -> bytes:
    """A line with some fields changed; those that are None are left out."""
    fields = {**line("a", "Hi"), **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def checked(data: bytes, max_lines: int = 100, max_line_bytes: int = 1000) -> LineChecker:
    checker = LineChecker(CHAT, max_lines, max_line_bytes)
    checker.feed(data)
    checker.finish()
    return checker


def test_a_line_is_read_with_the_bytes_of_its_body() -> None:
    head = b'{"custom_id":"a","method":"POST","url":"%s"' % CHAT.encode()
    found = parse_line(head + b',"body":{"x": 1}}', CHAT)
    assert (found.custom_id, found.body) == ("a", b'{"x": 1}')


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"custom_id":"\xff"}', "invalid_json_line", None),
        (raw(custom_id=None), "missing_required_parameter", "custom_id"),
        (raw(method=None), "missing_required_parameter", "method"),
        (raw(url=None), "missing_required_parameter", "url"),
        (raw(body=None), "missing_required_parameter", "body"),
        (raw(custom_id=7), "invalid_custom_id", "custom_id"),
        (raw(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (raw(method="GET"), "invalid_method", "method"),
        (raw(url="/v1/embeddings"), "invalid_url", "url"),
        (raw(body=[]), "invalid_request", "body"),
    ],
)
def test_a_wrong_line_is_refused(text: bytes, code: str, param: str | None) -> None:
    with pytest.raises(LineFaultError) as caught:
        parse_line(text, CHAT)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_faults_name_the_line_of_the_file() -> None:
    data = b"\n".join([raw(custom_id="1"), b"", raw(custom_id="1"), b"no", raw(custom_id="2")])
    found = checked(data)
    assert [(fault.line, fault.code) for fault in found.faults] == [
        (3, "duplicate_custom_id"),
        (4, "invalid_json_line"),
    ]


@pytest.mark.parametrize("data", [b"", b"\n \r\n"])
def test_a_file_without_lines_is_refused(data: bytes) -> None:
    assert [fault.code for fault in checked(data).faults] == ["empty_file"]


def test_a_file_with_too_many_lines_is_refused() -> None:
    data = b"".join(raw(custom_id=str(number)) + b"\n" for number in range(4))
    assert not checked(data, max_lines=4).faults
    assert [fault.code for fault in checked(data, max_lines=3).faults] == ["too_many_lines"]


def test_a_line_that_is_too_long_is_refused_and_not_kept() -> None:
    data = raw(custom_id="x" * 400) + b"\n" + raw(custom_id="2")
    found = checked(data, max_line_bytes=300)
    assert [(fault.line, fault.code) for fault in found.faults] == [(1, "line_too_long")]


def test_the_first_faults_are_told() -> None:
    assert len(checked(b"no\n" * 500, max_lines=1000).faults) == MAX_FAULTS


def test_a_byte_order_mark_is_no_fault() -> None:
    assert not checked(b"\xef\xbb\xbf" + raw()).faults


@given(
    st.lists(st.text("ab \r", max_size=12).map(str.encode), max_size=20),
    st.integers(1, 7),
)
def test_lines_do_not_depend_on_the_parts_in_which_a_file_arrives(
    lines: list[bytes], size: int
) -> None:
    data = b"\n".join(lines)
    splitter = LineSplitter(100)
    found = []
    for start in range(0, len(data), size):
        found += splitter.feed(data[start : start + size])
    found += splitter.finish()
    assert found == [(n, one.strip()) for n, one in enumerate(data.split(b"\n"), 1) if one.strip()]


def test_an_answer_is_one_line_whatever_the_replica_sent() -> None:
    whole = answer_line("a", 200, "r1", b'{\n "x": [1,\n 2]}')
    assert whole.count(b"\n") == 1 and whole.endswith(b"\n")
    found = json.loads(whole)
    assert found["response"] == {"status_code": 200, "request_id": "r1", "body": {"x": [1, 2]}}
    assert (found["custom_id"], found["error"], found["id"][:10]) == ("a", None, "batch_req_")
    assert json.loads(answer_line("a", 502, "r1", b"bad\ngateway"))["response"]["body"] == (
        "bad\ngateway"
    )


def test_a_line_without_an_answer_has_an_error() -> None:
    found = json.loads(error_line("a", "batch_expired", "Late."))
    assert (found["response"], found["error"]) == (
        None,
        {"code": "batch_expired", "message": "Late."},
    )

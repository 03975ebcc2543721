"""The moving picture of the demo: what a terminal printed, as an SVG file."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from scripts.record_demo import COLUMNS, MAX_PAUSE_S, READ_S, ROWS, draw, layout, record

SVG = "{http://www.w3.org/2000/svg}"


def test_styles_lines_and_long_lines_have_their_places() -> None:
    printed = [(0.0, b"\x1b[1mTitle\x1b[0m\nplain \x1b[2mfaint\x1b[0m\n" + b"x" * (COLUMNS + 3))]
    found = [(each.row, each.column, each.style, each.text) for each in layout(printed)]
    assert found == [
        (0, 0, "bold", "Title"),
        (1, 0, "", "plain "),
        (1, 6, "faint", "faint"),
        (2, 0, "", "x" * COLUMNS),
        (3, 0, "", "xxx"),
    ]


def test_an_escape_sequence_in_two_reads_is_one() -> None:
    found = list(layout([(0.0, b"a\x1b["), (0.1, b"1mb")]))
    assert [(each.style, each.text) for each in found] == [("", "a"), ("bold", "b")]


def test_long_waits_are_shortened_and_a_step_begins_after_a_rest() -> None:
    printed = [(3.0, b"one\n\n"), (4.0, b"two\n\n"), (60.0, b"\x1b[1mStep\x1b[0m")]
    assert [each.at_s for each in layout(printed)] == [0.0, 1.0, 1.0 + MAX_PAUSE_S + READ_S]


def test_the_picture_is_an_svg_that_scrolls_and_shows_every_text() -> None:
    lines = [(float(row), b"line <%d>\n" % row) for row in range(ROWS + 5)]
    root = ElementTree.fromstring(draw(list(layout(lines))))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts == [f"line\u00a0<{row}>" for row in range(ROWS + 5)]
    (shift,) = root.iter(f"{SVG}animateTransform")
    times = [float(each) for each in shift.get("keyTimes", "").split(";")]
    assert times == sorted(times) and len(times) == len(shift.get("values", "").split(";")) == 7


def test_the_output_of_a_command_is_recorded_and_its_failure_told() -> None:
    program = "import sys; print('hi', sys.stdout.isatty()); sys.exit(%d)"
    printed = list(record([sys.executable, "-c", program % 0]))
    assert b"".join(data for _, data in printed) == b"hi True\r\n"
    with pytest.raises(RuntimeError, match="ended with 3"):
        list(record([sys.executable, "-c", program % 3]))

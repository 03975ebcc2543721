"""Texts follow the project's rules for English (`scripts/prose.py`)."""

from __future__ import annotations

import pytest

from scripts.prose import places

MODULE = '"""{}"""\n\n\nclass A:\n    """A class."""\n\n    size = 3\n    """{}"""\n\n\n# {}\n'


def rules(file: str, source: str) -> list[tuple[int, str]]:
    """Line and rule of each place."""
    return [(place.line, place.rule.name) for place in places(file, source)]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Of each block its size.", "fragment"),
        ("Nobody waits.", "actor"),
        ("Blocks behind the first.", "word"),
        ("It tells what the engine holds.", "clause"),
        ("Wait: Never is it late.", "inverted"),
        ("A dear engine.", "private"),
    ],
)
def test_each_rule_finds_its_symptom_in_docstrings_comments_and_pages(text: str, rule: str) -> None:
    first_only = rule == "fragment"

    assert rules("a.py", MODULE.format(text, "Blocks.", "a comment")) == [(1, rule)]
    assert rules("a.py", MODULE.format("Blocks.", text, "a comment")) == [(8, rule)]
    assert rules("a.py", MODULE.format("Blocks.", "Bytes.", text)) == [(11, rule)] * (
        not first_only
    )
    assert rules("a.md", f"# Title\n\n{text}\n") == [(3, rule)] * (not first_only)


def test_later_lines_and_code_in_pages_are_looked_at_as_they_should_be() -> None:
    module = '"""Blocks.\n\nOf each its size. Everybody\nwaits.\n"""\n'

    assert rules("a.py", module) == [(3, "actor")]
    assert rules("a.md", "```\nnobody\n```\nnobody\n") == [(4, "actor")]

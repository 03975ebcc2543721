"""Find sentences that a newcomer stumbles over, in docstrings, comments and pages.

    python scripts/prose.py [PATH ...]

Prints `FILE:LINE: RULE: TEXT` for each place, and what each rule wants. The exit status is 1 if
there is a place. The rules find symptoms: a sentence that passes can still be bad.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PLACES = (
    *("platform", "prefill", "decode", "kvstore", "engine", "lab", "docs", "scripts"),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
)
GENERATED = ("docs/configuration.md", "docs/rest.md", "docs/commands.md")


class Rule(NamedTuple):
    """One symptom.

    Attributes:
        wants: what to write in its place.
        pattern: what it looks like, in one line of text.
        first_only: whether only the first line of a docstring is looked at.
    """

    name: str
    wants: str
    pattern: re.Pattern[str]
    first_only: bool = False


_FRAGMENT = "Of|As|All of|All that|What|Whose|That|Those|Likewise|Which|Who|From|For a|Also|Nothing"
RULES = (
    Rule(
        "fragment",
        'begin with a noun phrase (class, attribute) or an imperative (function: "Return the ...")',
        re.compile(rf"^({_FRAGMENT})\b(?!.*\?$)"),
        first_only=True,
    ),
    Rule(
        "actor",
        'name the component that acts: "the gateway", "the scheduler"',
        re.compile(r"\b(nobody|somebody|anybody|everybody|whoever|whose it is)\b", re.I),
    ),
    Rule(
        "word",
        'write "after", "again", "continues", "for now", "automatically"',
        re.compile(
            r"\bbehind (it|them|a|the|each|that)\b|\banew\b|\bas ever\b|\bgoes on\b|\bmeanwhile\b",
            re.I,
        ),
    ),
    Rule(
        "clause",
        'use a noun: "the part of the prompt that the request holds", not "what it holds of what"',
        re.compile(
            r"\bwhat (is|was|of|has|it|they|a|an|the|each|nobody|others?)\b[^.?]{0,60}"
            r"\b(is|are|was|were|has|have|goes|comes|stays|leaves|holds)\b",
            re.I,
        ),
    ),
    Rule(
        "inverted",
        "put the subject first",
        re.compile(
            r"(^|[.:;] )(Never|Only|So|Nor|Of|Told|Offloaded|Kept|Held|Left) "
            r"(is|are|was|were|does|do|has|have|can|may)\b"
        ),
    ),
    Rule(
        "private",
        "use the field's word: missing, resumed, expensive, disaggregated",
        re.compile(
            r"\b(untold|fared?|dear(er|est)?|taking up|take-up|taken up|strangers?|"
            r"apart (is|does|pays)|deaf(en)?|(is|are) gone|(has|have) come)\b",
            re.I,
        ),
    ),
)


CODE = re.compile(r"`[^`]*`")


class Place(NamedTuple):
    """A line that a rule matches."""

    file: str
    line: int
    rule: Rule
    text: str


def in_python(source: str) -> Iterator[tuple[int, bool, str]]:
    """Yield the texts of a module: the line, whether it is a docstring, and the text."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            value = getattr(item, "value", None) if isinstance(item, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield item.lineno, True, value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], False, token.string.lstrip("# ")


def in_page(source: str) -> Iterator[tuple[int, bool, str]]:
    """Yield the lines of a page that are neither code nor headings."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("#"):
            yield number, False, line


def places(file: str, source: str) -> Iterator[Place]:
    """Yield the places of one file that a rule matches."""
    for start, is_docstring, text in (in_python if file.endswith(".py") else in_page)(source):
        for offset, line in enumerate(text.strip().splitlines()):
            for rule in RULES:
                if rule.first_only and not (is_docstring and offset == 0):
                    continue
                if rule.pattern.search(CODE.sub("``", line)):
                    yield Place(file, start + offset, rule, line.strip())


def main(paths: Sequence[str]) -> int:
    """Look through files and folders, and print each place."""
    found: list[Place] = []
    for path in map(ROOT.joinpath, paths or PLACES):
        files = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        for each in files:
            name = str(each.relative_to(ROOT))
            if name not in GENERATED:
                found += places(name, each.read_text("utf-8"))
    for place in found:
        print(f"{place.file}:{place.line}: {place.rule.name}: {place.text}")
    for rule in RULES:
        if count := sum(place.rule is rule for place in found):
            print(f"{rule.name}: {count} times; {rule.wants}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

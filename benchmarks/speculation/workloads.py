"""Prompts for two workloads: one whose answers stand mostly in the prompt, and one of open prose.

All text comes with Python: its own source, and the chapters of its manual that `pydoc` carries.
Each prompt is a document, shared by a few prompts and cut to whole KV blocks so that the engine's
prefix cache holds it, and a short tail of its own. SmolLM2-135M copies reliably only what the
prompt's form makes it copy, hence the completion form.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Encode = Callable[[str], list[int]]

BLOCK = 128
DOCUMENT_TOKENS = 2 * BLOCK
DOCUMENTS = 12
PROSE_TOKENS = BLOCK
_MODULES = ("textwrap", "shlex", "heapq", "bisect", "fnmatch", "string", "calendar", "csv")
_MORE_MODULES = (
    "cmd",
    "difflib",
    "fractions",
    "statistics",
    "gettext",
    "getopt",
    "glob",
    "keyword",
)
_NAMES = ("ada", "grace", "alan", "edsger", "barbara", "donald", "tony", "john", "leslie", "robin")
_CITIES = ("Lisbon", "Oslo", "Quito", "Nairobi", "Hanoi", "Turin", "Perth", "Lima", "Cork", "Riga")
_SUBJECTS = (
    "a lighthouse keeper", "the last train of the night", "a garden on a roof", "a lost letter",
    "two brothers and a boat", "a winter market", "an old violin", "the map in the attic",
    "a baker who could not sleep", "the river in flood", "a chess player", "the empty school",
)  # fmt: skip


class Workload:
    """An endless supply of prompts, the same for all arms."""

    def __init__(self, name: str, encode: Encode) -> None:
        """`name`: "draftable" or "undraftable"."""
        self.name = name
        self.temperature = 0.0 if name == "draftable" else 1.0
        self._encode, self._rng = encode, random.Random(name)
        self.documents: list[list[int]] = []
        self._tails: list[Callable[[], str]] = []
        if name == "draftable":
            self._prepare_draftable()
        else:
            self._prepare_prose()

    def prompt(self, number: int, variant: int) -> list[int]:
        """One about document `number` (modulo their count), as token ids."""
        at = number % len(self.documents)
        self._rng.seed(f"{self.name} {at} {variant}")
        return self.documents[at] + self._encode(self._tails[at]())

    def _prepare_draftable(self) -> None:
        """A third each: code to repeat with a change, calls of functions, text to quote."""
        functions, chapters = _functions(), _chapters()
        for number in range(DOCUMENTS):
            kind = number % 3
            if kind == 0:
                self._code(functions, number)
            elif kind == 1:
                self._calls(number)
            else:
                self._quotes(chapters[number])

    def _cut(self, text: str) -> list[int]:
        ids = self._encode(text)
        return ids[: max(len(ids) // BLOCK, 1) * BLOCK][:DOCUMENT_TOKENS]

    def _code(self, functions: list[str], number: int) -> None:
        """The document is a module; the tail asks for one of its functions with another name."""
        shown, text = [], ""
        for function in functions[5 * number :] + functions:
            text += function + "\n\n"
            if len(self._encode(text)) > DOCUMENT_TOKENS:
                break
            shown.append(function)
        self.documents.append(self._cut(text))

        def tail() -> str:
            body = self._rng.choice(shown or functions[:1])
            name = body.split("def ", 1)[1].split("(", 1)[0]
            renamed = f"{name}_{self._rng.randrange(10, 99)}"
            head = body.replace(f"def {name}", f"def {renamed}", 1).split("\n", 1)[0]
            return f"\n\n# {name} from above, renamed to {renamed}:\n\n{head}\n"

        self._tails.append(tail)

    def _calls(self, number: int) -> None:
        """The document is a log of calls; the tail is the last question, and the call is due."""

        def call(name: str, city: str, day: int) -> str:
            arguments = {
                "customer": name,
                "city": city,
                "day": day,
                "currency": "EUR",
                "include_tax": True,
                "format": "detailed",
            }
            return json.dumps({"name": f"lookup_order_{number}", "arguments": arguments})

        def turn() -> tuple[str, str]:
            name, city = self._rng.choice(_NAMES), self._rng.choice(_CITIES)
            day = self._rng.randrange(1, 29)
            return f"User: order of {name}, {city}, day {day}\nCall:", " " + call(name, city, day)

        self.documents.append(self._cut("".join("".join(turn()) + "\n" for _ in range(12))))
        self._tails.append(lambda: '"}}\n' + turn()[0])

    def _quotes(self, chapter: str) -> None:
        """The document is a text; the tail begins to quote it."""
        text = " ".join(chapter.split())
        self.documents.append(self._cut(f'Text: "{text}'))
        sentences = [s.strip() for s in text[:700].split(". ")[:-1] if len(s) > 40] or [text[:100]]

        def tail() -> str:
            start = " ".join(self._rng.choice(sentences).split()[: self._rng.randrange(4, 9)])
            return f'..."\n\nThe text once more, word for word: "{start}'

        self._tails.append(tail)

    def _prepare_prose(self) -> None:
        """The document is a story's beginning, the tail a turn that it takes."""
        for subject in _SUBJECTS:
            start = f"Chapter one. This is a story about {subject}. "
            text = (
                start
                + (
                    "Nobody in the town had expected what came next, and those who claim otherwise "
                    "were not there on that day. It began, as such things do, with little. "
                )
                * 4
            )
            self.documents.append(self._encode(text)[:PROSE_TOKENS])
            self._tails.append(
                lambda: (
                    f" In the year {self._rng.randrange(1700, 2000)}, {self._rng.choice(_NAMES)} "
                    f"of {self._rng.choice(_CITIES)} decided"
                )
            )


def _functions() -> list[str]:
    return list(_iter_functions())


def _iter_functions() -> Iterator[str]:
    for module in _MODULES + _MORE_MODULES:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        source = Path(spec.origin).read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and 4 < (node.end_lineno or 0) - node.lineno < 14:
                yield ast.unparse(node)


def _chapters() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics) if len(topics[name]) > 2000]

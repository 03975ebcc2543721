"""Puts the line of a configuration file in front of each problem with a field of that file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import yaml


def with_file_lines(
    problems: Sequence[str], name: str, text: str, overridden: Iterable[str]
) -> list[str]:
    """Return the problems in the order of the file, each as `FILE:LINE: FIELD: WHAT`.

    A problem with a field that the file does not give has the line of its section. If the file has
    no such section, the problem has no line and comes last.

    Args:
        problems: `FIELD: WHAT` each, the field as a path with dots.
        name: the file's name.
        text: its content, which is valid YAML.
        overridden: paths of fields that the command line gives.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    others = [f"{path}." for path in overridden]
    found: list[tuple[int, str]] = []
    rest: list[str] = []
    for problem in problems:
        field = problem.partition(": ")[0]
        line = None if f"{field}.".startswith(tuple(others)) else _line(root, field)
        if line is None:
            rest.append(problem)
        else:
            found.append((line, f"{name}:{line}: {problem}"))
    return [problem for _, problem in sorted(found, key=lambda each: each[0])] + rest


def _line(node: yaml.Node | None, path: str) -> int | None:
    """Return the line of the longest part of a path that the file has, from 1 on."""
    line = None
    while path:
        step = _step(node, path)
        if step is None:
            break
        used, mark, node = step
        line, path = mark.line + 1, path[used + 1 :]
    return line


def _step(node: yaml.Node | None, path: str) -> tuple[int, yaml.Mark, yaml.Node] | None:
    """Return the length of the first name of a path, where it stands, and its value. A name may
    have dots; the longest one that fits is taken."""
    if isinstance(node, yaml.MappingNode):
        fits = [
            (len(key.value), key.start_mark, value)
            for key, value in node.value
            if isinstance(key, yaml.ScalarNode) and f"{path}.".startswith(f"{key.value}.")
        ]
        return max(fits, key=lambda each: each[0], default=None)
    index = path.partition(".")[0]
    if isinstance(node, yaml.SequenceNode) and index.isdigit() and int(index) < len(node.value):
        value = node.value[int(index)]
        return len(index), value.start_mark, value
    return None

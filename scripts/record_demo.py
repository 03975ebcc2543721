"""Records `headrace demo` on a real app as a moving picture: `python scripts/record_demo.py FILE`.

Starts the laptop's app under a name of its own, plays the demo in a pseudoterminal, and draws its
output as an SVG file that repeats. The picture shortens waits of more than `MAX_PAUSE_S` and rests
before each step; the printed seconds are the measured ones. The drawing understands only the demo's
own output: lines, bold and faint text.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLUMNS, ROWS = 92, 24
COLUMN_PX, ROW_PX, PADDING_PX, FONT_PX = 8.4, 19, 16, 14
MAX_PAUSE_S = 1.5
READ_S = 2.5
"""Seconds for which the end of a step stays before the next one."""
END_S = 6.0
"""Seconds for which the last lines stay."""
COLOURS = {"": "#d7dce2", "bold": "#7cc4ff", "faint": "#8b95a1"}
BACKGROUND = "#14181d"
NO_BREAK_SPACE = "\u00a0"
ESCAPE = re.compile(rb"\x1b\[([0-9;]*)m")
STYLES = {"": "", "0": "", "1": "bold", "2": "faint"}


@dataclass(frozen=True)
class Piece:
    """A text that appeared at once, in one style and one line."""

    at_s: float
    row: int
    column: int
    style: str
    text: str


def main() -> int:
    """Record, draw, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    name = f"demo-{secrets.token_hex(3)}"
    headrace = [sys.executable, "-m", "headrace.cli"]
    start = [*headrace, "up", "--detach", "--name", name, "--set", "gateway.port=0"]
    subprocess.run(start, check=True)
    try:
        printed = list(record([*headrace, "demo", "--yes", "--name", name]))
    finally:
        subprocess.run([*headrace, "down", "--name", name], check=False)
    args.file.write_text(draw(list(layout(printed))), "utf-8")
    print(f"{args.file}: {args.file.stat().st_size / 1024:.0f} KiB")
    return 0


def record(command: list[str]) -> Iterator[tuple[float, bytes]]:
    """Run a command in a pseudoterminal, and yield the seconds and bytes of each output.

    Raises:
        RuntimeError: the command failed.
    """
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, environment)
    began_s = time.monotonic()
    while True:
        select.select([terminal], [], [])
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        yield time.monotonic() - began_s, data
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {status}")


def layout(printed: list[tuple[float, bytes]]) -> Iterator[Piece]:
    """Yield the pieces of text with their places, and with long waits shortened."""
    at_s, before_s = 0.0, printed[0][0]
    row = column = 0
    style, rest = "", b""
    for when_s, data in printed:
        at_s += min(when_s - before_s, MAX_PAUSE_S)
        before_s = when_s
        data = rest + data
        cut = data.rfind(b"\x1b")
        rest = data[cut:] if cut >= 0 and ESCAPE.match(data, cut) is None else b""
        data = data[: len(data) - len(rest)]
        for number, part in enumerate(ESCAPE.split(data)):
            if number % 2:
                style = next(
                    (STYLES[code.decode()] for code in part.split(b";") if code.decode() in STYLES),
                    style,
                )
                continue
            for line_number, line in enumerate(part.decode("utf-8", "replace").split("\n")):
                if line_number:
                    row, column = row + 1, 0
                text = line.replace("\r", "")
                while text:
                    shown, text = text[: COLUMNS - column], text[COLUMNS - column :]
                    is_title = column == 0 and style == "bold"
                    if shown and is_title and row > 1:
                        at_s += READ_S
                    if shown:
                        yield Piece(at_s, row, column, style, shown)
                    column += len(shown)
                    if text:
                        row, column = row + 1, 0


def draw(pieces: list[Piece]) -> str:
    """Return the SVG document."""
    whole_s = pieces[-1].at_s + END_S
    width = COLUMNS * COLUMN_PX + 2 * PADDING_PX
    height = ROWS * ROW_PX + 2 * PADDING_PX
    texts = []
    shifts = {0.0: 0}
    for piece in pieces:
        shift = max(0, piece.row + 2 - ROWS)
        if shift != next(reversed(shifts.values())):
            shifts[piece.at_s] = shift
        if not piece.text.strip():
            continue
        x = PADDING_PX + piece.column * COLUMN_PX
        y = PADDING_PX + piece.row * ROW_PX + FONT_PX
        weight = ' font-weight="bold"' if piece.style == "bold" else ""
        texts.append(
            f'<text x="{x:.1f}" y="{y}" fill="{COLOURS[piece.style]}"{weight} '
            f'textLength="{len(piece.text) * COLUMN_PX:.1f}" visibility="hidden">'
            f"{escape(piece.text.replace(' ', NO_BREAK_SPACE))}"
            f'<animate attributeName="visibility" calcMode="discrete" values="hidden;visible" '
            f'keyTimes="0;{piece.at_s / whole_s:.5f}" dur="{whole_s:.2f}s" '
            f'repeatCount="indefinite"/></text>'
        )
    times = ";".join(f"{at_s / whole_s:.5f}" for at_s in shifts)
    values = ";".join(f"0 {-rows * ROW_PX}" for rows in shifts.values())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" '
        f'font-size="{FONT_PX}" role="img" '
        f'aria-label="headrace demo in a terminal">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>\n'
        f'<svg y="0" width="100%" height="{height - PADDING_PX}"><g>\n'
        f'<animateTransform attributeName="transform" type="translate" calcMode="discrete" '
        f'values="{values}" keyTimes="{times}" dur="{whole_s:.2f}s" repeatCount="indefinite"/>\n'
        + "\n".join(texts)
        + "\n</g></svg>\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Whether each family of models answers as plain vLLM does, whatever way its KV came.

    python -m benchmarks.families --json FILE [--only FAMILY] [--case NAME] [--answers N]
    python -m benchmarks.families --json FILE --ttft

Each family is a tiny random model. Its prompts are answered by a plain engine, and then by engines
with the store, NIXL and Headrace's extensions in each case of `cases.CASES`, from two processes on
two machines of one loopback. The tokens are compared one by one.

    differing       answers with another token, or another log-probability (`cases.CLOSE`), than a
                    plain engine's
    ties            answers that part from it where its own two best tokens tie (`cases.TIE`); they
                    are not differing
    error_nats      largest difference of log-probabilities
    local, external tokens that came from the engine's prefix cache, and from the store or another
                    engine, as vLLM counts them
    error           the case failed, or its KV came in another way than the case says
    plain_error     plain vLLM fails with a cached prompt, too
    refused         the engine has no store or no prefix cache, and says why
    leaked_blocks   blocks that are still held after all requests ended

With --ttft the time to the first token of a hit of 6,000 tokens is measured instead, for layers of
real size (`ttft`): `ratio` to a cold prompt should be at most 0.05.

FILE is written after each family. Families that it has already are left out, unless `--only` names
them. The file `benchmarks/families/results.json` is what docs/support.md is made from.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.families import ttft
from benchmarks.families.cases import ANSWER_TOKENS, ANSWERS, CASES, tolerated
from benchmarks.families.models import BY_NAME, FAMILIES
from benchmarks.families.trial import Trial, machines
from benchmarks.serving.environment import machine
from tests.support import compiled, run

LOGS = Path(__file__).parents[2] / "build" / "families"
"""The engines' logs, by family."""


def main() -> int:
    """Measure, print, write; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument(
        "--only", action="append", choices=sorted(BY_NAME), metavar="FAMILY", help="may be repeated"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        choices=[case.name for case in CASES],
        metavar="NAME",
        help="may be repeated; all by default",
    )
    parser.add_argument("--ttft", action="store_true", help="see above")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="of each case")
    args = parser.parse_args()
    compiled.keep_compiled()
    document: dict[str, Any] = {"families": {}}
    if args.json and args.json.exists():
        document = json.loads(args.json.read_text())
    if args.ttft:
        return _measure_ttft(document, args.json)
    names = args.only or [f.name for f in FAMILIES if f.name not in document["families"]]
    wrong = []
    for name in names:
        print(f"{name}:", flush=True)
        found = one_family(name, frozenset(args.case), args.answers)
        wrong += [f"{name}: {line}" for line in faults(found)]
        document["families"][name] = found
        document["families"] = {
            f.name: document["families"][f.name] for f in FAMILIES if f.name in document["families"]
        }
        document |= {"answer_tokens": ANSWER_TOKENS, "environment": machine()}
        _write(document, args.json)
    print(table(document["families"]))
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _write(document: dict[str, Any], file: Path | None) -> None:
    """Write results, each family in a line."""
    if file is not None:
        rest = {key: value for key, value in document.items() if key != "families"}
        families = document["families"].items()
        lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in families)
        head = '{"families": {\n' + ",\n".join(lines) + "\n}, "
        file.write_text(head + json.dumps(rest).removeprefix("{") + "\n")


def _measure_ttft(document: dict[str, Any], file: Path | None) -> int:
    folder = run.folder() / "families-ttft"
    folder.mkdir()
    try:
        document["ttft"] = found = ttft.measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(found)
    _write(document, file)
    return 0 if found["ratio"] <= ttft.TARGET else 1


def one_family(name: str, cases: frozenset[str], answers: int) -> dict[str, Any]:
    """Return one family's results."""
    folder = run.folder() / f"families-{name}"
    folder.mkdir()
    try:
        with machines(folder) as (prefill, decode):
            found = Trial(BY_NAME[name], prefill, decode, folder, answers, _report).results(cases)
    finally:
        LOGS.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            shutil.move(log, LOGS / f"{name}-{log.name}")
        shutil.rmtree(folder, ignore_errors=True)
    return found | {"date": time.strftime("%Y-%m-%d", time.gmtime())}


def faults(found: dict[str, Any]) -> list[str]:
    """Return what is wrong in a family's results, a line each."""
    lines = []
    for name, case in found["cases"].items():
        if case.get("differing", 0) > tolerated(found):
            lines.append(f"{name}: {case['differing']} of {case['answers']} answers differ")
        if "error" in case:
            lines.append(f"{name}: {case['error']}")
    lines += [f"{role}: {n} blocks leaked" for role, n in found["leaked_blocks"].items() if n]
    return lines


def table(families: dict[str, Any]) -> str:
    """Return the differing answers by family and case, in Markdown."""
    names = [case.name for case in CASES]
    lines = ["| family | " + " | ".join(names) + " | leaked |", "|---|" + "---|" * (len(names) + 1)]
    for found in families.values():
        cells = [_cell(found["cases"].get(name)) for name in names]
        leaked = "/".join(str(n) for n in found["leaked_blocks"].values())
        lines.append(f"| {found['title']} | " + " | ".join(cells) + f" | {leaked} |")
    return "\n".join(lines)


def _cell(case: dict[str, Any] | None) -> str:
    if case is None:
        return ""
    for kind, text in (("refused", "refused"), ("plain_error", "plain vLLM"), ("error", "error")):
        if kind in case:
            return text
    return f"{case['differing']} of {case['answers']}"


def _report(line: str) -> None:
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

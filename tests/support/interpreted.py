"""Tests of Triton kernels without a GPU, in Triton's interpreter.

Triton interprets only what it is told to before it is imported. So such tests are run again by a
process of its own, in which `INTERPRETED` is true. It runs those of all files of a run, because
most of its start is the import of vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import run
from tests.support.costs import REPORT, Costs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MARKER = "interpreted"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that interprets")
outside = pytest.mark.skipif(INTERPRETED, reason="is that process")


def pass_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    """Fail if a test fails, in that process, that the test of this request is marked with:
    `@pytest.mark.interpreted(...)` names files, or single tests as pytest does."""
    every = [mark for item in request.session.items for mark in item.iter_markers(MARKER)]
    costs, log = _run(tuple(dict.fromkeys(test for mark in every for test in mark.args)))
    for test in request.node.get_closest_marker(MARKER).args:
        name = str(Path(test).relative_to(request.config.rootpath))
        failed = [said for failed, said in costs.failures if failed.startswith(name)]
        assert not failed, "\n\n".join(failed)[-4000:]
        assert any(ran.startswith(name) for _, ran, _ in costs.tests), f"not run: {log[-4000:]}"


@cache
def _run(tests: tuple[str, ...]) -> tuple[Costs, str]:
    """What they cost in that process, failures included; and its output."""
    report = run.folder() / "interpreted.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", REPORT: str(report)},
        capture_output=True,
        text=True,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), log[-5000:]
    return Costs(**json.loads(report.read_text())), log


def compile_for_cards(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile a kernel to machine code of an H100.

    Args:
        types: Triton's types of arguments by name; others are numbers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = types | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

"""What `headrace_lab` adds to the command line and the simulator, and what it needs for that."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.console import CliError
from headrace_lab import cli
from headrace_lab.cli import lab_app

ROOT = Path(__file__).parents[2]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
GROUPS = [group for group in POINTS if group.startswith("headrace.")]
OURS = [(group, name) for group in GROUPS for name in POINTS[group]]
WITHOUT_ENGINE = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(("vllm", "ray", "nixl")))
import headrace_lab
for found in pkgutil.walk_packages(headrace_lab.__path__, "headrace_lab."):
    importlib.import_module(found.name)
"""


@pytest.mark.parametrize(("group", "name"), OURS)
def test_what_an_entry_point_names_is_there(group: str, name: str) -> None:
    module, _, attribute = POINTS[group][name].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "NEEDED", ("torch", "no_such_package"))
    found = CliRunner().invoke(lab_app, ["calibrate", "blending"])
    assert isinstance(found.exception, CliError)
    wanted = "headrace lab needs no_such_package: install it with pip install 'headrace[lab]'"
    assert str(found.exception) == wanted


def test_no_engine_is_needed() -> None:
    subprocess.run(
        [sys.executable, "-c", WITHOUT_ENGINE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )

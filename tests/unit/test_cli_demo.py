"""`headrace demo` before its first step; the steps run in tests/e2e/test_down.py."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from headrace.cli import client, state
from headrace.cli.console import CliError
from headrace.cli.show import demo

ELSEWHERE = state.Instance("http://127.0.0.1:1", "", phase="HEADRACE_URL", model="m")


def test_it_asks_and_so_needs_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(CliError, match="--yes"):
        demo.demo(None, ask=True)


@pytest.mark.parametrize(
    ("instance", "replicas", "why"),
    [
        (ELSEWHERE, [("decode", 1), ("prefill", 2)], "on this machine"),
        (state.Instance("a", "t", temp_dir="/nowhere"), [("decode", 1)], "no other replica"),
        (
            state.Instance("a", "t", temp_dir="/nowhere"),
            [("decode", 1), ("prefill", 2)],
            "does not belong to this app",
        ),
    ],
)
def test_it_kills_no_process_but_its_apps_own(
    monkeypatch: pytest.MonkeyPatch,
    instance: state.Instance,
    replicas: list[tuple[str, int]],
    why: str,
    tmp_path: Path,
) -> None:
    status = {"replicas": [{"role": role, "pid": pid} for role, pid in replicas]}
    monkeypatch.setattr(client, "get_json", lambda *_: status)
    shown = demo.Demo(instance, lambda text: None)
    kill = next(step for step in shown.steps if step.title.startswith("Kill"))
    with pytest.raises(demo.Skipped, match=why):
        kill.run()

"""To which part of an app a process's CPU time is counted."""

from __future__ import annotations

import pytest

from benchmarks.idle.cpu import Look, Thread, busiest, by_part, part_of

DECODE = "ray::ServeReplica:headrace:decode.handle_request"


@pytest.mark.parametrize(
    ("title", "parents", "part"),
    [
        ("VLLM::EngineCore", [DECODE, "raylet"], "engine, decode"),
        ("VLLM::Worker_TP0", ["VLLM::EngineCore", DECODE], "engine, decode"),
        ("VLLM::EngineCore", [], "engine, unknown"),
        (DECODE, ["raylet"], "replica, decode"),
        ("ray::ServeReplica:headrace-two:gateway", [], "replica, gateway"),
        ("python -m headrace.cli keep default", [], "headrace up's supervisor"),
        ("ray::ServeController.listen", [], "Ray"),
        ("gcs_server --log_dir=x", [], "Ray"),
    ],
)
def test_a_process_is_known_by_its_title(title: str, parents: list[str], part: str) -> None:
    assert part_of(title, parents) == part


def test_cores_are_cpu_seconds_over_wall_seconds() -> None:
    loop, other = Thread(1, 1, "engine, decode", "loop"), Thread(2, 2, "Ray", "raylet")
    first = Look(100.0, {loop: 5.0, other: 1.0}, {(1, "engine, decode"): 6.0, (2, "Ray"): 1.0})
    last = Look(110.0, {loop: 6.0, other: 1.5}, {(1, "engine, decode"): 8.0, (2, "Ray"): 1.5})
    assert by_part(first, last) == {"engine, decode": 0.2, "Ray": 0.05}
    assert busiest(first, last, 1) == [(loop, 0.1)]

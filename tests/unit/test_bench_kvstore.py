"""The store's benchmark: how times become figures, and which part runs."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.figures import quantile
from benchmarks.kvstore import __main__ as program
from benchmarks.kvstore import mooncake, nvme, overlap
from benchmarks.kvstore.child import Child
from benchmarks.kvstore.dram import check
from benchmarks.kvstore.itl import decode_steps
from benchmarks.kvstore.report import TARGETS, document, reached, table
from benchmarks.kvstore.stage import LAYERS, Stage
from benchmarks.kvstore.timing import CannotRun, Figures, ratios, take_turns


def test_arms_take_turns_and_the_first_round_does_not_count() -> None:
    called: list[str] = []

    def arm(name: str, spent: float):
        def run() -> float:
            called.append(name)
            return spent

        return run

    taken = take_turns({"a": arm("a", 1.0), "b": arm("b", 2.0)}, rounds=2)
    assert taken == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert sorted(called[:2]) == ["a", "b"]
    assert called[2:] == ["a", "b", "b", "a"]


def test_a_ratio_is_taken_round_by_round() -> None:
    figures = Figures()
    figures.add("x", ratios([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]))
    assert figures.values["x"] == 2.0
    assert figures.quartiles["x"] == (1.5, 2.5)


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert math.isnan(quantile([], 0.5))


def test_targets_are_named_where_they_are_missed() -> None:
    figures = Figures()
    figures.add("dram.load_vs_memcpy", 0.5)
    figures.add("idle.step_overhead", 1.0)
    assert reached("dram.load_vs_memcpy", 0.65) is True
    assert reached("idle.step_overhead", 1.02) is False
    assert reached("anything else", 0.0) is None
    lines = table(figures).splitlines()
    assert [line for line in lines if "missed" in line] == [
        "| `dram.load_vs_memcpy` | 0.500 |  | >= 0.65 **missed** |"
    ]


def test_what_could_not_be_measured_is_null_in_json() -> None:
    figures = Figures()
    figures.add("x", math.nan)
    assert document(figures, {}, None)["figures"] == {"x": None}


def test_parts_are_chosen_by_name_or_by_group() -> None:
    assert program.parse_parts("dram, engine") == ["dram", "ttft", "idle", "itl"]
    assert program.parse_parts("idle,engine") == ["idle", "ttft", "itl"]
    with pytest.raises(argparse.ArgumentTypeError, match="'tape' is none of dram"):
        program.parse_parts("tape")


@pytest.mark.parametrize(("chosen", "status"), [([], 0), (["--parts", "mooncake"], 1)])
def test_a_part_that_cannot_run_fails_the_run_only_where_it_was_asked_for(
    chosen: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cannot(figures: Figures, quick: bool) -> None:
        raise CannotRun("no wheel")

    monkeypatch.setattr(program, "PARTS", ("mooncake",))
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    monkeypatch.setattr(mooncake, "measure", cannot)
    monkeypatch.setattr("headrace.model.resolve", lambda name: str(name))
    assert program.main(chosen) == status
    assert "mooncake: not measured: no wheel\n" in capsys.readouterr().err


def test_every_target_is_of_a_part() -> None:
    prefixes = {"save": "itl"}
    for name in TARGETS:
        part = name.split(".")[0]
        assert prefixes.get(part, part) in program.PARTS


def test_what_is_saved_is_what_is_loaded() -> None:
    with Stage(blocks=2) as stage:
        check(stage)
        stage.wipe()
        stage.load_unverified(threads=1)
        stage.arena.view(0)[7] ^= 1
        with pytest.raises(RuntimeError, match="1 blocks were not loaded"):
            stage.load()


def test_a_slow_tier_hides_its_latency_only_if_asked_ahead() -> None:
    with Stage(blocks=1) as stage:
        stage.save()
        tier = overlap.SlowTier(stage, latency_s=1.0, layer_s=0.5)
        tier.begin(0)
        tier.begin(1)
        first_s, second_s = tier._arrives_s[:2]
        assert second_s == pytest.approx(first_s + 0.5, abs=0.05)


def test_calibration_finds_the_link_that_takes_as_long_as_the_computation() -> None:
    found = overlap.calibrate(lambda layer_s: LAYERS * layer_s + 0.1, lambda: 0.4)
    assert LAYERS * found + 0.1 == pytest.approx(0.4, rel=0.05)


def test_mooncake_is_given_its_faster_call_and_its_better_way() -> None:
    figures = Figures()
    mooncake.report(
        figures,
        {
            "one_process": ({"ours": [1.0], "layers": [1.0]}, {"ours": [1.0], "layers": [1.0]}),
            "two_processes": ({"ours": [1.0], "layers": [1.0]}, {"ours": [1.0], "layers": [9.0]}),
            "standalone": (
                {"ours": [1.0], "layers": [5.0], "whole": [3.0]},
                {"ours": [1.0], "layers": [4.0], "whole": [4.5]},
            ),
        },
        size_bytes=10**9,
    )
    assert figures.values["mooncake.standalone.put_gb_s"] == pytest.approx(1 / 3)
    assert figures.values["mooncake.put_ratio"] == 3.0
    assert figures.values["mooncake.get_ratio"] == 4.0


def test_a_cycle_without_its_prefill() -> None:
    assert decode_steps([[0.5, 0.1, 0.2], [0.1, 0.9]]) == [0.1, 0.2, 0.1]


def test_pages_in_the_page_cache_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDONLY)
    assert nvme.cached_share(fd) == 1.0
    os.close(fd)


def test_a_child_answers_and_tells_its_errors(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "from benchmarks.kvstore.child import serve\n"
        "class Echo:\n"
        "    def say(self, what): print('noise'); return what\n"
        "    def close(self): pass\n"
        "serve(Echo)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    child = Child("child", {}, environment, tmp_path / "log", package="")
    assert child.answer() is None
    assert child.do("say", what=[1, 2]) == [1, 2]
    with pytest.raises(RuntimeError, match="AttributeError"):
        child.do("sing")
    child.end()


def test_the_stage_has_the_engines_layout() -> None:
    with Stage(blocks=2) as stage:
        assert stage.layout.layer_bytes == 196_608
        assert stage.content().shape == (LAYERS, 2 * 196_608)
        assert np.array_equal(np.sort(stage.blocks), [0, 1])

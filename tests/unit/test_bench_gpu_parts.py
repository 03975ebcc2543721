"""The list of what needs a GPU: which part runs next, what is kept, and what the page says."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import cross_layer, drafting, hits, process, results, sparse
from benchmarks.gpu.parts import BY_NAME, PARTS, Part
from benchmarks.gpu.results import Results, Run

ROOT = Path(__file__).parents[2]
STATE = ROOT / "benchmarks" / "gpu" / "state.json"


def run(status: str = "done", **fields: Any) -> Run:
    told: dict[str, Any] = {
        "date": "2026-11-30",
        "card": "NVIDIA H200",
        "driver": "580.1",
        "software": "vllm 0.32.0",
        "commit": "abc",
        "command": "python -m benchmarks.gpu --only a",
        "seconds": 2.0,
    }
    return Run(status=status, **told | fields)


def part(name: str, **fields: Any) -> Part:
    told: dict[str, Any] = {"question": "Does it?", "limit_s": 10, "targets": {}}
    return Part(name, **told | fields)


class TestList:
    def test_names_are_unique_and_each_part_has_tests_or_a_module(self) -> None:
        assert len(BY_NAME) == len(PARTS)
        for each in PARTS:
            if each.tests:
                assert (ROOT / each.tests[0]).is_file()
            elif not each.open:
                module = importlib.import_module(f"benchmarks.gpu.{each.name}")
                assert {"measured", "figures", "markdown"} <= set(dir(module))

    def test_every_file_of_tests_is_in_a_part(self) -> None:
        files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
        assert files == {word for each in PARTS for word in each.tests if word.endswith(".py")}

    def test_a_part_that_can_run_has_a_limit_below_ten_minutes(self) -> None:
        for each in PARTS:
            assert bool(each.open) or 0 < each.limit_s < 600

    def test_the_page_has_the_table_of_the_state(self) -> None:
        page = (ROOT / "docs" / "gpu.md").read_text()
        assert results.table(PARTS, results.read(STATE)) in page


class TestOrder:
    def test_parts_that_were_tried_at_this_commit_come_after_those_that_were_not(self) -> None:
        parts = [part("a"), part("b"), part("c"), part("d"), part("e", open="no code")]
        runs = {"a": run("stopped"), "b": run(), "c": run("failed", commit="old")}
        found = results.order(parts, Results(runs=runs), "abc")
        assert [each.name for each in found] == ["c", "d", "a"]

    def test_without_a_commit_the_list_decides(self) -> None:
        runs = {"a": run("stopped", commit="")}
        found = results.order([part("a"), part("b")], Results(runs=runs), "")
        assert [each.name for each in found] == ["a", "b"]


class TestFile:
    def test_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        path = tmp_path / "state.json"
        assert results.read(path) == Results()
        state = Results(runs={"a": run(figures={"x": 1.5}, found={"1": {"ms": 2.0}}, note="so")})
        results.write(path, state)
        assert results.read(path) == state
        assert [each.name for each in tmp_path.iterdir()] == ["state.json"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "state.json: "),
            ('{"format": 2}', "format 2 is not 1"),
            ('{"runs": {"a": {}}}', "state.json: .*status"),
        ],
    )
    def test_another_file_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "state.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            results.read(path)

    def test_an_unknown_status_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "state.json"
        results.write(path, Results(runs={"a": run("begun")}))
        with pytest.raises(ValueError, match=r"runs\.a\.status: begun"):
            results.read(path)


class TestTable:
    def test_tells_figures_with_targets_and_why_a_part_is_open(self) -> None:
        parts = [part("a", targets={"x": "<= 1"}), part("b"), part("c", open="no code"), part("d")]
        found = run(figures={"x": 0.5, "other": 1.0})
        stopped = run("stopped", note="stopped after 10 s", card="NVIDIA H100", command="pytest d")
        table = results.table(parts, Results(runs={"a": found, "d": stopped}))
        assert table.split("\n")[2:] == [
            "| `a` | Does it? | `x` 0.5 (target <= 1) | (1) `python -m benchmarks.gpu --only a` |",
            "| `b` | Does it? | open: no card since it was written |  |",
            "| `c` | Does it? | open: no code |  |",
            "| `d` | Does it? | open: stopped after 10 s | (2) `pytest d` |",
            "",
            "- (1) 2026-11-30, NVIDIA H200, driver 580.1, vllm 0.32.0",
            "- (2) 2026-11-30, NVIDIA H100, driver 580.1, vllm 0.32.0",
        ]


class TestRun:
    def test_what_a_part_finds_is_kept_and_one_that_does_not_fit_is_left(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        seen: list[str] = []

        def ran(one: Part, log: Path, dry: bool = False) -> process.Outcome:
            assert [*results.read(path).runs] == seen, "the file is written after each"
            seen.append(one.name)
            return process.Outcome("stopped", 1.0, {"x": 1.0}, {"a": 1}, "stopped after 10 s")

        path = tmp_path / "state.json"
        monkeypatch.setattr(process, "run", ran)
        monkeypatch.setattr(program, "_card", lambda: ("card", "driver"))
        parts = [part("a"), part("b", limit_s=200), part("c")]
        program._run(parts, Results(), path, 100.0, tmp_path)
        found = results.read(path).runs
        assert list(found) == ["a", "c"]
        assert found["a"].card == "card" and found["a"].figures == {"x": 1.0}
        assert found["a"].command == "python -m benchmarks.gpu --only a"
        assert "b: left for the next call, its limit is 200 s" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--resume", "state.json"], "error: --resume: state.json: "),
            (["--only", "unwritten"], "error: --only: unwritten cannot run: no code"),
        ],
    )
    def test_what_cannot_be_used_is_told_before_anything_runs(
        self,
        options: list[str],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("state.json").write_text("{")
        monkeypatch.setitem(BY_NAME, "unwritten", part("unwritten", open="no code"))
        monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *options])
        with pytest.raises(SystemExit, match=message):
            program.main()


class TestProcess:
    def test_a_process_that_is_too_slow_is_stopped_with_its_children(self, tmp_path: Path) -> None:
        child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
        began_s = time.monotonic()
        found = process._run(
            [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"],
            os.environ,
            tmp_path / "log",
            3.0,
        )
        assert found is None and time.monotonic() - began_s < 30
        pid = int((tmp_path / "pid").read_text())
        deadline_s = time.monotonic() + 10
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def test_the_note_is_the_last_error(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("a\nValueError: too small\nbye\n")
        assert process.last_line(log) == "ValueError: too small"
        log.write_text("a\n\nbye\n")
        assert process.last_line(log) == "bye"
        log.write_text("")
        assert process.last_line(log) == "no output"

    def test_tests_are_counted(self, tmp_path: Path) -> None:
        report = tmp_path / "report.xml"
        assert process.tests_figures(report) == {}
        report.write_text(
            "<testsuites><testsuite tests='7' failures='1' errors='2' skipped='1'/></testsuites>"
        )
        assert process.tests_figures(report) == {
            "tests_passed": 3.0,
            "tests_failed": 3.0,
            "tests_skipped": 1.0,
        }


class TestFigures:
    """Of parts that were stopped, too."""

    def test_of_hits(self) -> None:
        found: dict[str, Any] = {"8192": {"dram": 1.0, "nvme": 4.0, "cold": 8.0}}
        told = {"ttft_dram_vs_cold_8192": 0.125, "ttft_nvme_vs_cold_8192": 0.5}
        assert hits.figures(found) == told
        found["itl"] = {
            "loads_p50_s": 1.0,
            "none_p50_s": 1.0,
            "loads_p99_s": 3.0,
            "none_p99_s": 2.0,
        }
        itl = {"itl_p50_beside_loads_vs_none": 1.0, "itl_p99_beside_loads_vs_none": 1.5}
        assert hits.figures(found) == told | itl

    def test_of_drafting(self) -> None:
        found = {"on": {"1": 30.0}, "off": {"1": 20.0}}
        assert drafting.figures({"on": {"1": 30.0}}) == {}
        assert drafting.figures(found) == {"drafting_1_at_once": 1.5}
        found["first"] = {"1": 10.0}
        assert drafting.figures(found)["first_runner_1_at_once"] == 0.5

    def test_of_sparse_attention_are_those_of_the_better_page(self) -> None:
        def one(scores: float, choice: float, sparse_ms: float, speedup: float) -> dict[str, Any]:
            ms = {"scores": scores, "scores and choice": choice, "sparse, Triton": sparse_ms}
            return {"ms_per_layer": ms, "speedup": speedup}

        found = {
            "131072.1.32": one(1.0, 3.0, 4.0, 5.0),
            "131072.1.16": one(2.0, 3.0, 8.0, 2.5),
            "32768.1.32": one(1.0, 1.0, 1.0, 9.0),
        }
        assert sparse.figures(found) == {
            "sparse_decode_speedup_128k_rows_1": 5.0,
            "sparse_scores_share_128k_rows_1": 0.25,
            "sparse_choice_share_128k_rows_1": 0.5,
        }

    def test_of_mixing_are_those_of_the_longest_context_with_most_rows(self) -> None:
        names = cross_layer.TRITON, cross_layer.TORCH, cross_layer.ONE
        found = {
            "2048.8": dict.fromkeys(names, 1.0),
            "32768.1": dict.fromkeys(names, 1.0),
            "32768.8": dict(zip(names, (2.0, 4.0, 1.0), strict=True)),
        }
        assert cross_layer.figures(found) == {
            "fused_decode_triton_vs_torch": 0.5,
            "fused_decode_triton_vs_one_layer": 2.0,
        }

"""The serving benchmark's arithmetic: from what clients saw to figures, table and plot."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import report
from benchmarks.serving.load import Load, Sample
from benchmarks.serving.report import Repeat


def sample(start: float = 0.1, gap: float = 0.05, tokens: int = 3, **more: Any) -> Sample:
    arrivals = [start + gap * i for i in range(tokens)]
    return Sample(arrivals, arrivals[-1] + 0.01, 50, tokens, "text", **more)


def repeat(arm: str, number: int, ttft_s: float, tok_s: float, **more: Any) -> Repeat:
    measures = {"ttft_p50_s": ttft_s, "ttft_mean_s": 2 * ttft_s, "tok_s": tok_s}
    return Repeat("short", 8, arm, number, measures, requests=16, **more)


def document(repeats: list[Repeat]) -> dict[str, Any]:
    environment = {
        "date": "2026-11-21 10:00 UTC",
        "cpu": "A CPU",
        "cores": 2,
        "memory_gb": 25,
        "model": "a-model",
        "versions": {"vllm": "0.29.0", "torch": None},
        "engine": {"dtype": "float32"},
        "order": "arms up together and interleaved",
    }
    return {
        "figures": report.figures(repeats),
        "ratios": report.ratios(repeats),
        "cells": report.cells(repeats),
        "environment": environment,
    }


THREE = [
    *(repeat("vllm", n, t, r) for n, (t, r) in enumerate([(0.10, 100), (0.20, 50), (0.10, 100)])),
    *(repeat("ray_pd", n, t, r) for n, (t, r) in enumerate([(0.4, 50), (0.8, 25), (0.4, 50)])),
    *(repeat("headrace", n, t, r) for n, (t, r) in enumerate([(0.1, 90), (0.2, 45), (0.2, 90)])),
]


def test_ttft_is_the_first_content_and_itl_the_gaps_between_contents() -> None:
    seen = report.summarise(Load([sample(0.1), sample(0.3), sample(0.2)], 2.0, 0.0))
    assert seen["ttft_p50_s"] == pytest.approx(0.2)
    assert seen["itl_p50_s"] == pytest.approx(0.05)
    assert seen["tpot_p50_s"] == pytest.approx(0.05)
    assert seen["e2e_p50_s"] == pytest.approx(0.31)
    assert seen["tok_s"] == pytest.approx(9 / 2.0)


def test_a_failed_request_counts_in_nothing_but_the_time_it_took() -> None:
    seen = report.summarise(Load([sample(), sample(9.0, error="HTTP 500")], 1.0, 0.0))
    assert seen["ttft_p50_s"] == pytest.approx(0.1)
    assert seen["tok_s"] == pytest.approx(3.0)


def test_a_repeat_in_which_all_failed_has_no_figures() -> None:
    seen = report.summarise(Load([Sample(error="refused")], 1.0, 0.0))
    assert math.isnan(seen["ttft_p50_s"])
    bad = Repeat("short", 8, "headrace", 0, seen, 1, ["refused"])
    good = repeat("vllm", 0, 0.1, 100)
    assert report.figures([good, bad]) == {"short.c8.tok_s_vs_vllm": 0.0}


@pytest.mark.parametrize(("q", "expected"), [(0, 1), (0.5, 2.5), (1, 4), (0.25, 1.75)])
def test_quantiles_are_interpolated(q: float, expected: float) -> None:
    assert report.quantile([4, 1, 3, 2], q) == expected


def test_a_cell_is_the_median_of_its_repeats_with_least_and_greatest() -> None:
    (row,) = [r for r in report.cells(THREE) if r["arm"] == "vllm"]
    assert row["ttft_p50_s"] == {"median": 0.10, "min": 0.10, "max": 0.20}
    assert (row["repeats"], row["requests"], row["errors"]) == (3, 48, 0)
    assert [raw["number"] for raw in row["raw"]] == [0, 1, 2]


def test_figures_divide_ours_by_the_peers_in_the_same_repeat() -> None:
    """The second repeat ran on a machine half as fast; that does not show in the figures."""
    assert report.figures(THREE) == {
        "short.c8.ttft_p50_vs_ray_pd": 0.25,
        "short.c8.ttft_p50_vs_vllm": 1.0,
        "short.c8.ttft_mean_vs_ray_pd": 0.25,
        "short.c8.ttft_mean_vs_vllm": 1.0,
        "short.c8.tok_s_vs_ray_pd": 1.8,
        "short.c8.tok_s_vs_vllm": 0.9,
    }
    assert report.ratios(THREE)["short.c8.ttft_p50_vs_ray_pd"]["max"] == pytest.approx(0.5)


def test_a_run_without_a_peer_has_no_figures_against_it() -> None:
    without = [r for r in THREE if r.arm != "ray_pd"]
    names = {f"short.c8.{name}_vs_vllm" for name in ("ttft_p50", "ttft_mean", "tok_s")}
    assert set(report.figures(without)) == names


def test_the_table_names_machine_and_date_and_shows_spread() -> None:
    table = report.markdown(document(THREE))
    assert "2026-11-21 10:00 UTC, A CPU, 2 cores" in table
    assert "vllm 0.29.0" in table and "torch" not in table
    assert "| short | 8 | 100 (100 to 200) | 400 (400 to 800) | 200 (100 to 200) |" in table
    assert "| `short.c8` | 0.25 (0.25 to 0.50) | 1.00 (1.00 to 2.00) |" in table
    assert "144 requests, 0 failed." in table


def test_an_arm_that_was_not_run_has_no_column() -> None:
    table = report.markdown(document([repeat("headrace", 0, 0.1, 90)]))
    assert "Ray P/D" not in table
    assert "| short | 8 | 100 | 90.0 |" in table


def test_failures_show_in_the_table() -> None:
    table = report.markdown(document([repeat("vllm", 0, 0.1, 9.0, errors=["HTTP 500"])]))
    assert "16 requests, 1 failed." in table


def test_everything_reported_is_json() -> None:
    again = json.loads(json.dumps(document(THREE)))
    assert report.markdown(again) == report.markdown(document(THREE))


def test_what_stands_between_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- serving:begin -->\nold\n<!-- serving:end -->\nafter\n")
    report.write_markdown(page, {"serving": "new\n", "measured": "brief"})
    report.write_markdown(page, {"serving": "newer\n"})
    assert page.read_text() == (
        "before\n<!-- serving:begin -->\nnewer\n<!-- serving:end -->\nafter\n"
    )


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("mine")
    with pytest.raises(ValueError, match="serving:begin"):
        report.write_markdown(page, {"serving": "new"})
    assert page.read_text() == "mine"


def test_a_new_file_gets_the_table_alone(tmp_path: Path) -> None:
    report.write_markdown(tmp_path / "new.md", {"serving": "table\n", "measured": "brief"})
    assert (tmp_path / "new.md").read_text() == "table\n"


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    report.plot(document(THREE), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

"""`headrace lab simulate`: the fits of a file or of a running app, the sample trace, the report."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.console import CliError
from headrace.cli.main import main
from headrace.config.key_file import hash_of
from headrace_lab.cli.simulate.command import _fits
from headrace_lab.simulate.hardware import Hardware
from headrace_lab.simulate.html_report import conclusion, page
from headrace_lab.simulate.outcome import GoodputTargets
from headrace_lab.simulate.policy_catalog import find_policy
from headrace_lab.simulate.run import SimulationRun, SimulationSettings, simulate
from headrace_lab.simulate.trace import read_trace, sample_trace, scale_trace
from tests.unit.gateway_fakes import answer, gateway_over

ROOT = {"admin_key_hash": hash_of(b"operator-key")}


@pytest.mark.parametrize("path", ["", "/", "/headrace/v1/status"])
async def test_the_fits_of_an_app_with_keys_take_the_key_of_the_environment(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "operator-key")
    async with gateway_over(answer, **ROOT) as bench:
        assert "replicas" in await asyncio.to_thread(_fits, bench.url + path)


async def test_without_the_key_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    async with gateway_over(answer, **ROOT) as bench:
        with pytest.raises(CliError, match=r"--calibrate .*set HEADRACE_API_KEY"):
            await asyncio.to_thread(_fits, bench.url)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"--calibrate .*missing"):
        _fits(str(tmp_path / "missing"))


def test_a_wrong_policy_is_refused_before_the_trace_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lab", "simulate", "--trace", "no-such-file", "--policy", "round-robbin"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told == 'error: no policy is called "round-robbin"; did you mean "round-robin"?\n'


def test_the_sample_trace_has_some_hundred_requests_that_share_blocks() -> None:
    trace = read_trace(sample_trace())
    assert 200 < len(trace) < 1000 and trace.distinct < 0.7 * len(trace.keys)


@pytest.fixture(scope="module")
def run() -> SimulationRun:
    work = scale_trace(read_trace(sample_trace()), 1.0, 60.0, 0)
    return simulate(work, Hardware(), 1, 1, find_policy("round-robin"), SimulationSettings())


def test_a_run_has_the_time_to_first_token_of_each_measured_request(run: SimulationRun) -> None:
    assert len(run.ttft_s) == run.outcome.requests
    assert run.ttft_s.mean() == pytest.approx(run.outcome.ttft_mean)


def test_the_report_begins_with_the_conclusion_and_fits_a_phone(run: SimulationRun) -> None:
    runs = {"headrace": run, "<b>other": run}
    text = page("a run", {"seed": "0"}, runs, GoodputTargets())
    assert text.index("keeps the targets for") < text.index("<table") < text.index("<svg class")
    assert 'name="viewport"' in text and not re.search(r'<svg[^>]* width="[1-9]\d\d', text)
    assert "Share of requests with their first token within" in text
    assert "<b>other" not in text and "&lt;b&gt;other" in text


def test_the_lines_of_a_chart_differ_in_dashes_as_well_as_in_colour(run: SimulationRun) -> None:
    text = page("a run", {}, {"a": run, "b": run}, GoodputTargets())
    strokes = set(re.findall(r"<polyline ([^>]*?) points", text))
    assert len(strokes) == 2 and sum("dasharray" in one for one in strokes) == 1


def test_the_conclusion_names_the_best_policy_first(run: SimulationRun) -> None:
    good = replace(run.outcome, goodput=0.96, ttft_p50=0.4, ttft_p99=2.0)
    bad = replace(run.outcome, goodput=0.11)
    assert conclusion({"dynamo": bad, "headrace": good}) == (
        "headrace keeps the targets for 96% of the requests; half of all requests have their first "
        "token within 0.4 s, 99 % within 2 s. The other policies: dynamo for 11%."
    )

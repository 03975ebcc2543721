"""`headrace explain`: lists recent requests, and says why one was served where it was."""

from __future__ import annotations

import io
import json
import re
from importlib.resources import files
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import client
from headrace.cli.console import CliError
from headrace.cli.show import explain
from headrace.cli.state import Instance
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.place import place
from headrace.router.placement.request import PlacementRequest

LONG_ID = "chatcmpl-0123456789abcdef0123456789abcdef"
FINISHED = {
    "id": LONG_ID,
    "path": "/v1/chat/completions",
    "at": 990.0,
    "status": 200,
    "error": None,
    "ttft_s": 0.35,
    "total_s": 4.2,
    "tokens": 1128,
    "replica": "zyxwvuts987",
}
FLYING = {
    "id": "chat-1",
    "path": "/v1/completions",
    "at": 995.0,
    "age_s": 5.0,
    "ttft_s": None,
    "tokens": None,
    "replica": "zyxwvuts987",
}
RECENT = {"now": 1000.0, "in_flight": [FLYING], "finished": [FINISHED]}


def a_plan(name: str = "cmpl-1", measured: dict[str, Any] | None = None, **asked: Any) -> Any:
    view = ClusterView(16, 1000.0)
    for replica, role in (("p", "prefill"), ("d", "decode"), ("e", "decode")):
        view.add(replica, role, view.node("here"))  # type: ignore[arg-type]
    plan = place(view, PlacementRequest(name, 2000, **asked)).to_dict()
    return plan | ({"measured": measured} if measured else {})


def listed(width: int, *finished: dict[str, Any]) -> str:
    out = io.StringIO()
    recent = {**RECENT, "finished": list(finished) or [FINISHED]}
    explain.render_list(recent, Console(file=out, width=width))
    return out.getvalue()


def shown(plan: dict[str, Any]) -> str:
    out = io.StringIO()
    explain.render(plan, Console(file=out, width=80))
    return out.getvalue()


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers of the running instance, by path; others are 404."""
    answers: dict[str, Any] = {}
    instance = Instance("default", "t", endpoint="http://127.0.0.1:8000")

    def get(instance: Instance, path: str) -> Any:
        if path not in answers:
            raise client.NotFoundError("not here")
        return answers[path]

    monkeypatch.setattr(client, "running_instance", lambda name: instance)
    monkeypatch.setattr(client, "get_json", get)
    return answers


def test_the_list_has_requests_in_flight_first_and_all_columns_if_they_fit() -> None:
    header, first, second, hint = listed(130).splitlines()
    assert header.split() == ["id", "age", "path", "status", "TTFT", "total", "tokens", "replica"]
    assert first.split() == ["chat-1", "5", "s", "completions", "waits", "5.00", "s", "zyxwvuts"]
    assert second.split()[:5] == [LONG_ID, "10", "s", "chat/completions", "200"]
    assert "1,128" in second and "350 ms" in second and "--last" in hint


def test_a_narrow_terminal_gets_fewer_columns_and_the_whole_id() -> None:
    lines = listed(80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert LONG_ID in lines[2] and "replica" not in lines[0] and "TTFT" in lines[0]


def test_the_list_says_why_requests_failed() -> None:
    refused = {**FINISHED, "status": 429, "error": "rate_limit_exceeded", "ttft_s": None}
    text = listed(150, refused, {**FINISHED, "status": 499})
    assert "rate_limit_exceeded" in text and "client left" in text


def test_an_app_without_requests_says_so() -> None:
    out = io.StringIO()
    explain.render_list({"now": 1.0, "in_flight": [], "finished": []}, Console(file=out))
    assert out.getvalue() == "no request since the gateway started\n"


def test_the_reason_comes_first_in_words() -> None:
    plan = a_plan() | {
        "reasons": ["local saves 0.245 s", "formula"],
        "decode": "d",
        "kind": "local",
    }
    assert " ".join(shown(plan).split()).startswith(
        "Answered by d, because that is predicted to cost 245 ms less than a remote prefill"
    )


def test_a_remote_prefill_names_both_replicas() -> None:
    plan = a_plan() | {
        "kind": "remote",
        "prefill": "prefill",
        "replica": "p",
        "reasons": ["remote saves 1.500 s"],
    }
    assert explain.reason(plan) == (
        f"Prefilled by p and answered by {plan['decode']}, because that is predicted to cost "
        "1.50 s less than a prefill on the decode replica"
    )


def test_other_reasons_are_told_as_the_router_gives_them() -> None:
    plan = a_plan() | {"reasons": ["policy is remote"]}
    assert explain.reason(plan).endswith("because policy is remote")


def test_measured_stands_beside_predicted_and_zero_rows_are_left_out() -> None:
    measured = {"ttft_s": 1.5, "cached_tokens": 1984}
    plan = a_plan(measured=measured, ttft_target_s=1e-3)
    lines = shown(plan).splitlines()
    (first,) = [line for line in lines if line.startswith("time to first token")]
    assert first.endswith("1.50 s")
    (total,) = [line for line in lines if line.startswith("total cost")]
    assert not total.endswith("2.50 s"), "the delay of others is not measured"
    zero = {part for part in explain.PARTS if not plan["predicted"].get(f"local.{part}")}
    zero = {part for part in zero if not plan["predicted"].get(f"remote.{part}")}
    assert zero and not any(line.startswith(explain.PARTS[part]) for part in zero for line in lines)
    for said in (
        "prompt: 2,000 tokens: 2,000 computed",
        "cache: 1,984 prompt tokens reused; 0 were cached somewhere",
        "no choice keeps every target: this one breaks the TTFT target",
    ):
        assert said in lines


def test_last_explains_the_newest_request_that_has_a_plan(
    app: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    app[explain.PATH] = RECENT
    app[f"/headrace/v1/plans/{LONG_ID}"] = a_plan(LONG_ID)
    explain.explain(None, None, last=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["request_id"] == LONG_ID


def test_without_an_id_the_list_is_printed(
    app: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    app[explain.PATH] = RECENT
    explain.explain(None, None, last=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == RECENT


@pytest.mark.parametrize(
    ("request_id", "last", "why"),
    [
        ("nope", False, "no replica has a plan of nope: it keeps its last 1,000"),
        (None, True, "none of the recent requests has a plan"),
        ("nope", True, "not both"),
    ],
)
def test_what_cannot_be_explained_is_said(
    request_id: str | None, last: bool, why: str, app: dict[str, Any]
) -> None:
    app[explain.PATH] = RECENT
    with pytest.raises(CliError, match=why):
        explain.explain(request_id, None, last=last, as_json=False)


def test_the_console_names_the_parts_as_the_command_does() -> None:
    text = (files("headrace.console") / "static" / "lib" / "plans.js").read_text()
    shown = dict(re.findall(r'^  (\w+): \["([^"]+)", "', text, re.MULTILINE))
    assert {
        part: name[:1].lower() + name[1:] for part, name in shown.items()
    } == explain.PARTS | explain.OTHERS

"""An app that drafts answers as one that does not, over either way, and obeys its operator."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.app import DRAFT_TOKENS, MODEL, QUIET_TENANT, App, Session, until
from tests.support.prompts import TEXT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("same_replicas"),
    pytest.mark.timeout(300),
]

ANSWER_TOKENS = 24
UNDRAFTED: dict[str, Any] = {"vllm_xargs": {"headrace_draft": 0}}
PROMPTS = [f"{TEXT[start : start + 900]}\nThe same text again: " for start in (0, 40, 80)]


@pytest.fixture(scope="module", autouse=True)
def drafting(_running_app: App) -> Iterator[None]:
    """Whether drafting pays is the planner's matter: here every draft there is is verified."""
    with _running_app.drafting(f"static:{DRAFT_TOKENS}"):
        yield


def answer(client: openai.OpenAI, prompt: str, salt: str, **extra: Any) -> list[int]:
    """A greedy answer's token ids."""
    made = client.completions.create(
        model=MODEL,
        prompt=prompt,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt, **extra},
    )
    return list(made.choices[0].token_ids)  # type: ignore[attr-defined]


def accepted(app: App) -> int:
    """Draft tokens that the engine accepted so far."""
    counts = app.replica("decode")["speculation"]["counts"]
    return int(counts.get("accepted_tokens", 0))


def hear_of(app: App, more_than: int) -> None:
    """Reports come once a second."""
    until(lambda: accepted(app) > more_than, 10.0, "accepted drafts", lambda: accepted(app))


@pytest.mark.parametrize("way", ["local", "remote"])
def test_answers_are_those_of_an_app_that_does_not_draft(
    app: App, client: openai.OpenAI, way: str
) -> None:
    before, salt = accepted(app), uuid.uuid4().hex
    with app.policy(way), ThreadPoolExecutor(len(PROMPTS)) as pool:

        def all_of(**extra: Any) -> list[list[int]]:
            return list(pool.map(lambda prompt: answer(client, prompt, salt, **extra), PROMPTS))

        plain = all_of(**UNDRAFTED)
        assert all_of() == plain  # drafted from the prompt and the answer so far
        hear_of(app, before)
        assert all_of() == plain  # and from the answer that was kept


def test_streams_choices_and_grammars_go_with_drafts(app: App, client: openai.OpenAI) -> None:
    before, ask = accepted(app), [{"role": "user", "content": "Name two colours."}]
    colours = ["red and green", "blue and green"]
    for _ in range(3):
        made = client.chat.completions.create(
            model=MODEL,
            messages=ask,  # type: ignore[arg-type]
            temperature=0.7,  # of greedy answers vLLM makes one
            n=2,
            max_tokens=40,
            extra_body={"structured_outputs": {"choice": colours}},
        )
        assert len(made.choices) == 2
        assert {choice.message.content for choice in made.choices} <= set(colours)
    pieces = client.completions.create(
        model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=ANSWER_TOKENS, stream=True
    )
    streamed = "".join(piece.choices[0].text for piece in pieces if piece.choices)
    whole = client.completions.create(
        model=MODEL,
        prompt=PROMPTS[0],
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        extra_body=UNDRAFTED,
    )
    assert streamed == whole.choices[0].text
    hear_of(app, before)


def test_who_is_not_to_be_drafted_for_is_not(app: App, client: openai.OpenAI) -> None:
    def drafted() -> int:
        counts = app.replica("decode")["speculation"]["counts"]
        return int(counts.get("drafted_tokens", 0))

    def steps() -> int:
        return int(app.replica("decode")["speculation"]["counts"]["steps"])

    before, at = drafted(), steps()
    answer(client, PROMPTS[0], QUIET_TENANT)
    answer(client, PROMPTS[0], "loud", **UNDRAFTED)
    until(lambda: steps() > at, 10.0, "a report of these steps")
    assert drafted() == before


def test_the_kill_switch_holds_until_it_is_changed(app: App, client: openai.OpenAI) -> None:
    path = "/headrace/v1/speculation"
    assert app.client.put(path, json={"mode": "off"}).status_code == 200
    until(lambda: app.drafting_mode() == "off", 3.5, "drafting off")
    answer(client, PROMPTS[1], "any")
    assert app.client.put(path, json={"mode": f"static:{DRAFT_TOKENS}"}).status_code == 200
    until(lambda: app.drafting_mode() == "static", 15.0, "drafting on again")


def test_an_operator_loads_lists_and_removes_a_corpus(
    app_session: Session, app: App, client: openai.OpenAI, tmp_path: Path
) -> None:
    cli = [sys.executable, "-m", "headrace.cli"]

    def corpus(*arguments: str) -> str:
        done = subprocess.run(
            [*cli, "corpus", *arguments, "--name", app_session.name],
            env=app_session.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    salt, before = uuid.uuid4().hex, accepted(app)
    plain = client.completions.create(
        model=MODEL,
        prompt="The river",
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        extra_body={"ignore_eos": True, "cache_salt": salt, **UNDRAFTED},
    )
    (tmp_path / "river.txt").write_text("The river" + plain.choices[0].text)
    corpus("load", str(tmp_path / "river.txt"), "--corpus", "rivers", "--tenant", salt)
    assert "rivers" in corpus("list")
    answer(client, "The river", salt)
    hear_of(app, before)
    corpus("remove", "rivers", "--tenant", salt)
    assert "rivers" not in corpus("list")


def test_metrics_tell_of_drafting(app: App) -> None:
    def told() -> bool:
        text = app.client.get("/metrics").text
        return "ray_headrace_speculation_accepted_tokens" in text

    until(told, 30.0, "drafting in the metrics")

"""An app whose engines cannot draft, which is the default: the other files' app can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.app import App, Session
from tests.support.exact import answer_by
from tests.support.prompts import exactness_prompts, plain_prompts, text_ids
from tests.support.truth import plain_truth

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.clean()


@pytest.fixture(scope="module")
def app(session: Session) -> App:
    return session.start(**{"speculation.enabled": "false"})


@pytest.mark.parametrize("way", ["local", "remote"])
def test_greedy_answers_are_those_of_a_plain_engine(app: App, model_folder: Path, way: str) -> None:
    prompts = [p for p in exactness_prompts(text_ids(model_folder)) if 63 <= len(p) <= 513][::2]
    assert len(prompts) >= 8
    with app.policy(way):
        answers = [answer_by(app, way, prompt) for prompt in prompts]
    truth = plain_truth(model_folder, plain_prompts(model_folder))
    assert not truth.differences(prompts, answers)


def test_what_needs_drafting_says_what_to_set(app: App) -> None:
    for method, path in (("GET", ""), ("PUT", "/c"), ("DELETE", "/c")):
        body = {"texts": ["x"]} if method == "PUT" else None
        answer = app.client.request(method, "/headrace/v1/memory" + path, json=body)
        assert answer.status_code == 409
        assert "set speculation.enabled: true" in answer.json()["error"]["message"]


def test_it_ends_and_leaves_nothing(session: Session, app: App) -> None:
    assert session.stop() == []

"""Stored KV at other places of a prompt: for requests that ask, and for nobody else."""

from __future__ import annotations

import pydoc_data.topics
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.test_store import store
from tests.support.app import MODEL, App, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FIRST = pydoc_data.topics.topics["strings"][:1200]
SECOND = pydoc_data.topics.topics["numeric-types"][:1200]
QUESTION = "Which of the documents is about numbers? Answer with its name."
HEADER = "x-headrace-techniques"


def ask(app: App, texts: list[str], salt: str, **extra: Any) -> httpx.Response:
    documents = "\n\n".join(f"Document:\n{text}" for text in texts)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{documents}\n\n{QUESTION}"}],
        "max_tokens": 8,
        "temperature": 0,
        "cache_salt": salt,
        "logprobs": True,
        "vllm_xargs": extra,
    }
    return app.client.post("/v1/chat/completions", json=body, timeout=120)


def answer(response: httpx.Response) -> list[tuple[str, float]]:
    """Tokens, with log-probabilities."""
    assert response.status_code == 200, response.text
    said = response.json()["choices"][0]["logprobs"]["content"]
    return [(token["token"], token["logprob"]) for token in said]


def reused(app: App) -> int:
    """Tokens that were reused at other places so far."""
    return int(app.replica("decode")["blending"]["tokens"])


def store_documents(app: App, salt: str) -> None:
    """Have the store hold both documents, each from a prompt of its own.

    The node counts other clients' blocks, too, so the wait is for a request that reuses them.
    """
    for text in (FIRST, SECOND):
        answer(ask(app, [text], salt))

    def found() -> bool:
        response = ask(app, [uuid.uuid4().hex, SECOND, FIRST], salt, blending="auto")
        return response.headers[HEADER] == "blending"

    until(found, 60.0, "stored documents to reuse", lambda: store(app)["tiers"])


@pytest.fixture(scope="module")
def salt(_running_app: App) -> str:
    """Of a client whose documents are stored."""
    name = uuid.uuid4().hex
    store_documents(_running_app, name)
    return name


@pytest.mark.parametrize("policy", ["local", "remote"])
def test_a_request_that_asks_reuses_documents_in_another_order(
    app: App, salt: str, policy: str
) -> None:
    texts = [f"{policy} readers first.", SECOND, FIRST]
    exact = answer(ask(app, texts, uuid.uuid4().hex))
    before = reused(app)
    with app.policy(policy):
        response = ask(app, texts, salt, blending="auto")
    found = answer(response)
    assert response.headers[HEADER] == "blending"
    assert reused(app) - before > 350
    assert found[0][0] == exact[0][0]
    assert abs(found[0][1] - exact[0][1]) < 0.5
    # Nobody else meets that KV: the same prompt, asked for exactly, is answered as ever.
    again = answer(ask(app, texts, salt))
    assert [token for token, _ in again] == [token for token, _ in exact]
    assert [value for _, value in again] == pytest.approx([v for _, v in exact], abs=1e-3)


@pytest.mark.parametrize(
    "extra", [{}, {"blending": "off"}, {"blending": "auto", "techniques": "off"}], ids=str
)
def test_a_request_that_does_not_ask_reuses_nothing(
    app: App, salt: str, extra: dict[str, Any]
) -> None:
    before = reused(app)
    response = ask(app, [f"Not for {sorted(extra)}.", SECOND, FIRST], salt, **extra)
    assert response.headers[HEADER] == "exact"
    assert reused(app) == before


def test_nobody_reuses_what_another_salt_stored(app: App, salt: str) -> None:
    before = reused(app)
    answer(ask(app, ["For others.", SECOND, FIRST], f"not-{salt}", blending="auto"))
    assert reused(app) == before


def test_a_prompt_of_which_little_was_seen_is_computed(app: App, salt: str) -> None:
    before = reused(app)
    new = pydoc_data.topics.topics["compound"][:3200]
    answer(ask(app, [new, FIRST[:430]], salt, blending="auto"))
    assert reused(app) == before


def test_exact_requests_among_reusing_ones_are_answered_as_alone(app: App, salt: str) -> None:
    prompts = [[f"Reader {n}.", SECOND, FIRST] for n in range(2)]
    alone = [answer(ask(app, texts, uuid.uuid4().hex)) for texts in prompts]
    before = reused(app)
    with ThreadPoolExecutor(4) as pool:
        reusing = [pool.submit(ask, app, texts, salt, blending="auto") for texts in prompts]
        exact = [pool.submit(ask, app, texts, uuid.uuid4().hex) for texts in prompts]
        among = [answer(one.result()) for one in exact]
        assert all(answer(one.result()) for one in reusing)
    assert reused(app) > before
    for one, other in zip(alone, among, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]


def test_a_budget_of_all_is_full_computation(app: App, salt: str) -> None:
    texts = ["All of it.", SECOND, FIRST]
    exact = answer(ask(app, texts, uuid.uuid4().hex))
    assert answer(ask(app, texts, salt, blending=1)) == [
        (token, pytest.approx(value, abs=1e-3)) for token, value in exact
    ]


@pytest.mark.parametrize("share", [0, 1.5, -0.1, "much", True])
def test_a_share_that_is_none_is_refused(app: App, share: Any) -> None:
    response = ask(app, ["x"], "s", blending=share)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("invalid_technique", "vllm_xargs.blending")

"""Conversations and their items: added by responses and clients, listed, changed, deleted."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.unit import responses_replica
from tests.unit.gateway_fakes import MODEL, Bench
from tests.unit.responses_replica import sent, texts_of

bench, client = responses_replica.bench, responses_replica.client


async def test_a_conversation_collects_the_items_of_its_responses(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    conversation = await client.conversations.create(
        metadata={"topic": "tests"},
        items=[{"type": "message", "role": "system", "content": "Be short."}],
    )
    for text in ("One", "Two"):
        made = await client.responses.create(model=MODEL, input=text, conversation=conversation.id)
        assert made.conversation is not None and made.conversation.id == conversation.id
    assert texts_of(sent(bench)) == ["Be short.", "One", "2: One", "Two"]
    listed = await client.conversations.items.list(conversation.id, order="asc")
    assert [item.content[0].text for item in listed.data] == [  # type: ignore[union-attr]
        *("Be short.", "One", "2: One", "Two", "4: Two"),
    ]
    with pytest.raises(openai.BadRequestError, match=conversation.id):
        await client.responses.create(model=MODEL, input="x", previous_response_id=made.id)


async def test_a_streamed_response_joins_its_conversation(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    conversation = await client.conversations.create()
    stream = await client.responses.create(
        model=MODEL, input="One", conversation={"id": conversation.id}, stream=True
    )
    async for _ in stream:
        pass
    assert len((await client.conversations.items.list(conversation.id)).data) == 2


async def test_a_conversation_is_changed_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create(metadata={"a": "1"})
    assert (await client.conversations.retrieve(made.id)).metadata == {"a": "1"}
    changed = await client.conversations.update(made.id, metadata={"b": "2"})
    assert changed.metadata == {"b": "2"} and changed.created_at == made.created_at
    gone = await client.conversations.delete(made.id)
    assert gone.deleted and gone.object == "conversation.deleted"
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(made.id)


async def test_items_are_added_found_paged_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create()
    for start in (0, 20):
        added = await client.conversations.items.create(
            made.id,
            items=[
                {"type": "message", "role": "user", "content": f"{start + n}"} for n in range(20)
            ],
        )
    assert len(added.data) == 20 and not added.has_more
    texts = []
    async for item in client.conversations.items.list(made.id, limit=7, order="asc"):
        texts.append(item.content[0].text)  # type: ignore[union-attr]
    assert texts == [str(n) for n in range(40)]
    newest = (await client.conversations.items.list(made.id, limit=1)).data[0]
    assert newest.content[0].text == "39"  # type: ignore[union-attr]
    same = await client.conversations.items.retrieve(newest.id, conversation_id=made.id)  # type: ignore[arg-type]
    assert same == newest
    left = await client.conversations.items.delete(newest.id, conversation_id=made.id)  # type: ignore[arg-type]
    assert left.id == made.id
    newest = (await client.conversations.items.list(made.id, limit=1)).data[0]
    assert newest.content[0].text == "38"  # type: ignore[union-attr]


async def test_a_deleted_conversation_keeps_its_responses(
    bench: Bench, client: openai.AsyncOpenAI
) -> None:
    conversation = await client.conversations.create()
    made = await client.responses.create(model=MODEL, input="One", conversation=conversation.id)
    await client.conversations.delete(conversation.id)
    assert (await client.responses.retrieve(made.id)).output_text == "1: One"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{}] * 21}, "items"),
        ({"items": [{"type": "web_search_call"}]}, "items"),
        ({"items": [{"content": "x"}]}, "items"),
        ({"items": [{"role": "user"}]}, "items"),
        ({"items": "x"}, "items"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
async def test_wrong_conversations_are_refused_by_field(
    bench: Bench, body: dict[str, Any], param: str
) -> None:
    reply = await bench.client.post("/v1/conversations", json=body)
    assert reply.status == 400
    assert (await reply.json())["error"]["param"] == param


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=101", "limit=x", "after=x"])
async def test_wrong_parameters_of_lists_are_refused(bench: Bench, query: str) -> None:
    made = await (await bench.client.post("/v1/conversations", json={})).json()
    reply = await bench.client.get(f"/v1/conversations/{made['id']}/items?{query}")
    assert reply.status == 400

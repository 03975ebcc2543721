"""Conversation state in a real S3 API: two gateways share it, and an outage costs no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from headrace.config.conversations import ConversationSettings
from headrace.gateway.conversations.setup import StateSetup
from headrace.gateway.conversations.state import ConversationState
from headrace.gateway.kept_records import object_store
from headrace.gateway.kept_records import state_runner as state_module
from tests.support.kvobjects import BUCKET, Line, s3_options
from tests.unit.gateway_fakes import MODEL, gateway_over
from tests.unit.responses_replica import SECRET, respond

Open = Callable[[], ConversationState]


@pytest.fixture
def opened(line: Line, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the state of one more gateway."""
    monkeypatch.setattr(object_store, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(state_module, "WAIT_S", 5.0)
    settings = ConversationSettings(object_url=f"s3://{BUCKET}/{request.node.name}")
    setup = StateSetup(settings, SECRET, s3_options(line.port))

    def no_folder() -> Path:
        raise AssertionError

    def open_state() -> ConversationState:
        state = setup.make(no_folder, lambda made: made)
        assert state is not None
        return state

    return open_state


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_gateways_of_several_machines_share_it(opened: Open) -> None:
    async with (
        gateway_over(respond, state=opened()) as one,
        gateway_over(respond, state=opened()) as two,
        client(one.url) as first,
        client(two.url) as second,
    ):
        previous = None
        for turn in range(6):
            asked = (first, second)[turn % 2]
            made = await asked.responses.create(
                model=MODEL, input=f"T{turn}", previous_response_id=previous
            )
            assert made.output_text == f"{2 * turn + 1}: T{turn}"
            previous = made.id
        conversation = await first.conversations.create(metadata={"a": "b"})
        await second.responses.create(model=MODEL, input="One", conversation=conversation.id)
        await first.responses.create(model=MODEL, input="Two", conversation=conversation.id)
        listed = (await second.conversations.items.list(conversation.id)).data
        assert len(listed) == 4
        await second.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await first.responses.retrieve(made.id)


@pytest.mark.parametrize("mode", ["dead", "held"])
async def test_an_outage_costs_no_answer_that_needs_no_history(
    opened: Open, line: Line, mode: str
) -> None:
    async with gateway_over(respond, state=opened()) as bench, client(bench.url) as asked:
        made = await asked.responses.create(model=MODEL, input="One")
        assert made.store is True
        line.set(mode)
        new = await asked.responses.create(model=MODEL, input="One")
        assert (new.output_text, new.store) == ("1: One", False)
        with pytest.raises(openai.InternalServerError) as refused:
            await asked.responses.create(model=MODEL, input="Two", previous_response_id=made.id)
        assert refused.value.status_code == 503
        line.set("whole")
        again = await asked.responses.create(model=MODEL, input="Two", previous_response_id=made.id)
        assert again.output_text == "3: Two"

"""The official `openai` client finds what it knows: answers, streams, tools, schemas, errors."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import openai
import pydantic
import pytest

from tests.support.app import MODEL, App

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("same_replicas")]

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


# Answers


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=CAPITAL, max_tokens=32, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 10
    assert 0 < answer.usage.completion_tokens <= 32
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.total_tokens == total


def test_a_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CAPITAL, max_tokens=32, **GREEDY)
    stream = client.chat.completions.create(
        messages=CAPITAL,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="One, two, three, four,", max_tokens=8, **GREEDY)
    assert answer.object == "text_completion"
    assert "five" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_streamed_completion_says_the_same(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"prompt": "One, two, three, four,", "max_tokens": 8, **GREEDY}
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(stream=True, **request))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks), "usage was not asked for"


def test_several_prompts_in_one_completion(client: openai.OpenAI) -> None:
    prompts = ["One, two, three, four,", "The capital of France is"]
    answer = client.completions.create(prompt=prompts, max_tokens=6, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "five" in answer.choices[0].text
    assert "Paris" in answer.choices[1].text


def test_a_prompt_of_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt=[504, 3575, 282], max_tokens=4, extra_body={"return_token_ids": True}, **GREEDY
    )
    choice: Any = answer.choices[0]
    assert len(choice.token_ids) == 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_max_completion_tokens_is_understood(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=CAPITAL, max_completion_tokens=3, **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


# Sampling


def test_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt="One, two, three, four,", max_tokens=32, stop=["seven"], **GREEDY
    )
    assert "six" in answer.choices[0].text
    assert "seven" not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_repeats_a_sample(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=1, seed=seed
        )
        return answer.choices[0].text

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_n_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, n=3, temperature=1, seed=1, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content for choice in answer.choices)


def test_n_answers_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once upon a time", n=2, temperature=1, max_tokens=4, stream=True
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert all(texts.values())


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=CAPITAL, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token, "greedy takes the most likely"
        assert token.top_logprobs == sorted(token.top_logprobs, key=lambda t: -t.logprob)


def test_completion_logprobs_with_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt="The capital of France is", max_tokens=2, logprobs=2, echo=True, **GREEDY
    )
    choice = answer.choices[0]
    assert choice.text.startswith("The capital of France is")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 7


@pytest.mark.parametrize("way", ["local", "remote"])
def test_logprobs_are_those_of_either_way(app: App, client: openai.OpenAI, way: str) -> None:
    with app.policy(way):
        answer = client.completions.create(
            prompt="The capital of France is",
            max_tokens=3,
            logprobs=1,
            extra_body={"cache_salt": uuid.uuid4().hex},
            **GREEDY,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    _SEEN.append([round(value or 0, 3) for value in logprobs.token_logprobs])
    assert _SEEN[0] == pytest.approx(_SEEN[-1], abs=2e-3)


_SEEN: list[list[float]] = []

# Tools and structure


def arguments_of(call: Any) -> dict[str, Any]:
    assert call.type == "function"
    assert call.id
    assert call.function.name == "get_weather"
    return dict(json.loads(call.function.arguments))


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_tool_that_must_be_called(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "What is the weather in Rome, in Celsius?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice=choice,
        max_tokens=96,
        **GREEDY,
    )
    message = answer.choices[0].message
    assert message.tool_calls
    arguments = arguments_of(message.tool_calls[0])
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["unit"] in ("C", "F")


def test_a_tool_that_must_be_called_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        messages=[{"role": "user", "content": "What is the weather in Rome, in Celsius?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=96,
        stream=True,
        **GREEDY,
    )
    name, arguments = "", ""
    for chunk in stream:
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            if call.function is not None:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_a_tool_that_may_be_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=CAPITAL,
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice="auto",
        max_tokens=16,
        **GREEDY,
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls


def test_a_tools_result_goes_back(client: openai.OpenAI) -> None:
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome", "unit": "C"}'},
    }
    messages: list[Any] = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "21 degrees, sunny"},
    ]
    answer = client.chat.completions.create(messages=messages, max_tokens=16, **GREEDY)
    assert answer.choices[0].message.content


class City(pydantic.BaseModel):
    """What the model is to fill in."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    river: bool
    districts: int = pydantic.Field(ge=1, le=99)


def test_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        response_format=City,
        max_tokens=64,
        **GREEDY,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, City)


def test_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": 'Answer with {"ok": true} only.'}],
        response_format={"type": "json_object"},
        max_tokens=48,
        **GREEDY,
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


# Models and errors


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL


def body_of(error: openai.APIStatusError) -> dict[str, Any]:
    """The error object, which must have OpenAI's fields."""
    body = error.body
    assert isinstance(body, dict)
    assert set(body) >= {"message", "type", "param", "code"}, body
    assert isinstance(body["message"], str) and body["message"]
    return body


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as chat:
        client.chat.completions.create(model="gpt-99", messages=CAPITAL, max_tokens=1)
    assert "gpt-99" in body_of(chat.value)["message"]
    with pytest.raises(openai.NotFoundError) as completion:
        client.completions.create(model="gpt-99", prompt="x", max_tokens=1)
    assert body_of(completion.value)["param"] == "model"
    with pytest.raises(openai.NotFoundError) as retrieve:
        client.models.retrieve("gpt-99")
    assert body_of(retrieve.value)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"top_p": 7}, "top_p"),
        ({"n": 0}, "n"),
        ({"messages": []}, "message"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "8192"),
        ({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
    ],
)
def test_a_bad_request_says_what_is_wrong(
    client: openai.OpenAI, wrong: dict[str, Any], word: str
) -> None:
    request: dict[str, Any] = {"messages": CAPITAL, "max_tokens": 2, **GREEDY, **wrong}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request)
    assert caught.value.status_code == 400
    assert word in str(body_of(caught.value))


def test_a_streamed_request_fails_before_its_stream(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=CAPITAL, stream=True, top_p=7, **GREEDY)


def test_what_is_not_offered_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


# At once


async def test_many_at_once_each_get_their_own(app: App) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=180
    ) as client:

        async def ask(number: int) -> str:
            stream = await client.completions.create(
                prompt=f"Repeat: item {number}, item {number}, item {number}, item",
                max_tokens=4,
                stream=True,
                **GREEDY,
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        numbers = list(range(10, 42))
        alone = [await ask(number) for number in numbers[::4]]
        answers = await asyncio.gather(*map(ask, numbers))
    assert answers[::4] == alone
    right = [str(n) in answer for n, answer in zip(numbers, answers, strict=True)]
    assert sum(right) > len(numbers) / 2, "a small model errs, but not that often"

"""The calls of `benchmarks.clients`, run in an environment that has the clients:
`python calls.py ENVIRONMENT URL`. The last line that it prints is a JSON object: what went wrong in
each call, nothing where it worked.

It imports nothing of Headrace. The model is small: schemas leave it little choice, so that each
answer is valid however it was drawn.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import pydantic

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the weather in Rome?"


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Paris"]
    sunny: bool


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def of_openai(url: str) -> dict[str, Callable[[], Any]]:
    import anthropic
    import openai
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
    claude = anthropic.Anthropic(base_url=url, api_key="none", timeout=120, max_retries=0)
    chat: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    function: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    flat: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
    theirs: Any = {"name": "weather", "input_schema": SCHEMA}

    def tools() -> None:
        answer = client.chat.completions.create(**chat, tools=[function], max_tokens=64)
        assert answer.choices[0].message.content or answer.choices[0].message.tool_calls

    def required() -> None:
        answer = client.chat.completions.create(
            **chat, tools=[function], tool_choice="required", max_tokens=128
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")

    def parsed_tool() -> None:
        answer = client.chat.completions.parse(
            **chat,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice="required",
            max_tokens=128,
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)

    def responses_tool() -> None:
        answer = client.responses.create(
            model=MODEL, input=QUESTION, tools=[flat], tool_choice="required", max_output_tokens=128
        )
        [call] = [item for item in answer.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        again: Any = [{"role": "user", "content": QUESTION}, call.to_dict(), result]
        answer = client.responses.create(
            model=MODEL, input=again, tools=[flat], max_output_tokens=32
        )
        assert answer.output

    def responses_stream() -> None:
        with client.responses.stream(
            model=MODEL, input=QUESTION, tools=[flat], max_output_tokens=5
        ) as stream:
            kinds = [event.type for event in stream]
        assert kinds[-1] == "response.incomplete", kinds

    def responses_parse() -> None:
        answer = client.responses.parse(
            model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=128
        )
        assert isinstance(answer.output_parsed, Weather)

    def claude_tools() -> None:
        answer = claude.messages.create(**chat, tools=[theirs], max_tokens=64)
        assert answer.id.startswith("msg_") and answer.content
        assert "stop_sequence" in answer.model_fields_set

    def claude_any() -> None:
        answer = claude.messages.create(
            **chat, tools=[theirs], tool_choice={"type": "any"}, max_tokens=128
        )
        [call] = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == "tool_use" and call.input["city"] in ("Rome", "Paris")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        messages = [
            *chat["messages"],
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {"role": "user", "content": [result]},
        ]
        asked: Any = {**chat, "messages": messages}
        assert claude.messages.create(**asked, tools=[theirs], max_tokens=32).content

    def claude_stream() -> None:
        with claude.messages.stream(**chat, tools=[theirs], max_tokens=32) as stream:
            message = stream.get_final_message()
        assert message.id.startswith("msg_") and message.usage.output_tokens

    def claude_error() -> None:
        try:
            claude.messages.create(**{**chat, "model": "nope"}, max_tokens=1)
        except anthropic.NotFoundError as error:
            body: Any = error.body
            assert body["type"] == "error" and body["error"]["type"] == "not_found_error", body
        else:
            raise AssertionError("no error")

    @tool
    def weather(city: Literal["Rome", "Paris"]) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    lang = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=128)  # type: ignore[arg-type,call-arg]

    def lang_function() -> None:
        got = lang.with_structured_output(Weather, method="function_calling").invoke(QUESTION)
        assert isinstance(got, Weather)

    def lang_default() -> None:
        assert isinstance(lang.with_structured_output(Weather).invoke(QUESTION), Weather)

    def lang_tools() -> None:
        answer = lang.bind_tools([weather]).invoke(QUESTION)
        assert answer.content or answer.tool_calls
        answer = lang.bind_tools([weather], tool_choice="any").invoke(QUESTION)
        assert answer.tool_calls[0]["args"]["city"] in ("Rome", "Paris")

    return {
        "openai: chat with tools": tools,
        "openai: chat, a tool required": required,
        "openai: chat.parse with a tool": parsed_tool,
        "openai: responses, a tool and its result": responses_tool,
        "openai: responses.stream that is cut": responses_stream,
        "openai: responses.parse": responses_parse,
        "anthropic: messages with tools": claude_tools,
        "anthropic: any tool, and its result": claude_any,
        "anthropic: messages.stream with tools": claude_stream,
        "anthropic: errors": claude_error,
        "langchain: function_calling": lang_function,
        "langchain: structured output": lang_default,
        "langchain: bind_tools": lang_tools,
    }


def of_agents(url: str) -> dict[str, Callable[[], Any]]:
    import agents
    import openai
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    agents.set_tracing_disabled(True)
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings = ModelSettings(max_tokens=256)

    def weather(city: Literal["Rome", "Paris"]) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    def output(model: Any, kind: Any) -> Callable[[], None]:
        def run() -> None:
            agent = Agent(model, output_type=kind, model_settings=settings, retries=2)
            assert isinstance(agent.run_sync(QUESTION).output, Weather)

        return run

    def tools(model: Any) -> Callable[[], None]:
        def run() -> None:
            agent = Agent(model, tools=[weather], model_settings=settings)
            assert agent.run_sync(QUESTION).output

        return run

    def agent(model: Any, *, stream: bool, forced: bool) -> Callable[[], None]:
        def run() -> None:
            asyncio.run(ask())

        async def ask() -> None:
            choice = "required" if forced else None
            one = agents.Agent(
                name="a",
                model=model(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")),
                tools=[agents.function_tool(weather)],
                model_settings=agents.ModelSettings(max_tokens=96, tool_choice=choice),
                tool_use_behavior="stop_on_first_tool" if forced else "run_llm_again",
            )
            if stream:
                result: Any = agents.Runner.run_streamed(one, QUESTION)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(one, QUESTION)
            assert result.final_output
            assert not forced or str(result.final_output).startswith("sunny in ")

        return run

    def chat(client: Any) -> Any:
        return agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)

    def responses(client: Any) -> Any:
        return agents.OpenAIResponsesModel(model=MODEL, openai_client=client)

    models = (
        OpenAIChatModel(MODEL, provider=provider),
        OpenAIResponsesModel(MODEL, provider=provider),
    )
    return {
        "pydantic-ai: output by its default": output(models[0], Weather),
        "pydantic-ai: ToolOutput": output(models[0], ToolOutput(Weather)),
        "pydantic-ai: tools": tools(models[0]),
        "pydantic-ai: responses, output": output(models[1], Weather),
        "pydantic-ai: responses, tools": tools(models[1]),
        "openai-agents: chat with tools": agent(chat, stream=False, forced=False),
        "openai-agents: chat, a tool required": agent(chat, stream=False, forced=True),
        "openai-agents: chat, streamed": agent(chat, stream=True, forced=True),
        "openai-agents: responses with tools": agent(responses, stream=False, forced=False),
        "openai-agents: responses, a tool required": agent(responses, stream=False, forced=True),
        "openai-agents: responses, streamed": agent(responses, stream=True, forced=True),
    }


def of_instructor(url: str) -> dict[str, Callable[[], Any]]:
    import instructor
    import openai

    def mode(kind: Any) -> Callable[[], None]:
        def run() -> None:
            plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
            client = instructor.from_openai(plain, mode=kind)
            asked: Any = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 256}
            got = client.chat.completions.create(model=MODEL, response_model=Weather, **asked)
            assert isinstance(got, Weather)

        return run

    kinds = ("TOOLS", "JSON_SCHEMA")
    return {f"instructor: {kind}": mode(getattr(instructor.Mode, kind)) for kind in kinds}


def of_litellm(url: str) -> dict[str, Callable[[], Any]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network otherwise
    import litellm

    function = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}

    def call(model: str, base: str, *, forced: bool) -> Callable[[], None]:
        def run() -> None:
            answer: Any = litellm.completion(
                model=model,
                api_base=base,
                api_key="none",
                messages=[{"role": "user", "content": QUESTION}],
                tools=[function],
                tool_choice="required" if forced else "auto",
                max_tokens=128,
            )
            message = answer.choices[0].message
            assert message.content or message.tool_calls
            if forced:
                [one] = message.tool_calls
                assert json.loads(one.function.arguments)["city"] in ("Rome", "Paris")

        return run

    return {
        f"litellm: {model.partition('/')[0]}, {'a tool required' if forced else 'tools'}": call(
            model, base, forced=forced
        )
        for model, base in (
            (f"openai/{MODEL}", f"{url}/v1"),
            (f"hosted_vllm/{MODEL}", f"{url}/v1"),
            (f"anthropic/{MODEL}", url),
        )
        for forced in (False, True)
    }


def main() -> None:
    """Run an environment's calls."""
    found = globals()[f"of_{sys.argv[1]}"](sys.argv[2])
    told = {}
    for name, call in found.items():
        try:
            call()
            told[name] = ""
        except Exception as error:
            told[name] = f"{type(error).__name__}: {str(error)[:500]}"
    print(json.dumps(told))


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "none")
    main()

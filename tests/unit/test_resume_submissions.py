"""A resumed request may be submitted several times: each submission adds its own requests, once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor

from headrace_decode.apis.prompt_usage import USAGE, PromptUsage
from headrace_decode.resume import output_replay
from headrace_decode.resume.emitted import (
    EmittedChoice,
    EmittedOutput,
    cached_tokens_of,
    decode_lines,
    media_of,
)
from headrace_decode.resume.recorder import RECORDER, OutputRecorder
from headrace_decode.resume.resumable_llm import vllm_drafter
from tests.support.prefill_executor import LATE_S, PULL, RESULT, Planner, until
from tests.support.resuming import Core, Frontend, PrefillSide, text, token

PROMPT = [3, 5, 8]
TOKENS = 12


@pytest.fixture(autouse=True)
async def _leaves_no_task() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left


def said(tokens: int, choice: int = 0, *, ends: bool = False) -> list[EmittedOutput]:
    """What the lost replica's engine said: so many tokens, one by one."""
    finish = {tokens - 1: "length"} if ends else {}
    return [
        (EmittedChoice(choice, (token(PROMPT, place),), finish=finish.get(place)),)
        for place in range(tokens)
    ]


async def resume(
    llm: Frontend,
    outputs: list[EmittedOutput],
    name: str = "r",
    picture: str | None = None,
    **params: Any,
) -> dict[int, list[int]]:
    """The tokens of each choice of a resumed request, those said before included.

    Args:
        picture: name of a picture in the prompt.
    """
    recorder = OutputRecorder()
    recorder.earlier = outputs
    RECORDER.set(recorder)
    told = SamplingParams(**{"max_tokens": TOKENS, "output_kind": RequestOutputKind.DELTA} | params)
    tokens: dict[int, list[int]] = {}
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": PROMPT}
    if picture is not None:
        media = {"mm_kwargs": {"image": [{}]}, "mm_hashes": {"image": [picture]}}
        places = {"image": [PlaceholderRange(offset=1, length=1)]}
        prompt = {**prompt, "type": "multimodal", **media, "mm_placeholders": places}
    async with aclosing(llm.generate(prompt, told, name)) as answer:
        async for output in answer:
            llm.cached_tokens.append(output.num_cached_tokens or 0)
            for choice in output.outputs:
                tokens.setdefault(choice.index, []).extend(choice.token_ids)
    return tokens


WHOLE = {0: text(PROMPT, TOKENS)}


async def test_a_stream_about_a_picture_is_resumed_about_the_same_picture_only() -> None:
    llm = Frontend(Core())
    assert await resume(llm, [], picture="a") == WHOLE
    recorder = RECORDER.get()
    assert recorder is not None
    outputs = decode_lines(recorder.take())[:5]
    assert media_of(outputs) and not media_of(outputs[1:])
    assert await resume(llm, outputs, picture="a") == WHOLE
    for other in ("b", None):
        with pytest.raises(VLLMValidationError, match="are others now"):
            await resume(llm, outputs, picture=other)
    with pytest.raises(VLLMValidationError, match="are others now"):
        await resume(llm, said(3), picture="a")
    llm.assert_idle()
    await llm.stop()


@pytest.mark.parametrize("had", [1, 5, 250, 500])
@pytest.mark.parametrize("kv", ["comes", "never", "fails"])
@pytest.mark.parametrize("prefill", ["answers", "fails", "hangs"])
async def test_late_or_failed_kv_adds_no_request_twice(had: int, kv: str, prefill: str) -> None:
    core = Core(kv)
    llm = Frontend(core, Planner("p", LATE_S), PrefillSide(prefill))
    tokens = had + 5
    assert await resume(llm, said(had), max_tokens=tokens) == {0: text(PROMPT, tokens)}
    await until(lambda: not core.running)
    assert len(core.added) == len(set(core.added)) and not core.resources.engine_dead
    llm.assert_idle()
    await llm.stop()


async def test_a_local_submission_that_is_still_fed_leaves_the_pull_alone_when_it_loses() -> None:
    """KV that comes while hundreds of outputs are being led through the frontend again."""
    core = Core("never")
    llm = Frontend(core, Planner("p", LATE_S))
    answering = asyncio.create_task(resume(llm, said(3000), max_tokens=3005))
    await until(lambda: len(llm.output_processor.request_states) == 2)
    core.kv = "comes"
    assert await answering == {0: text(PROMPT, 3005)}
    await until(lambda: not core.running)
    llm.assert_idle()
    await llm.stop()


async def test_two_streams_of_one_name_are_resumed_each_by_its_own_outputs() -> None:
    core = Core()
    llm = Frontend(core)
    found = await asyncio.gather(
        resume(llm, said(3)),
        resume(llm, said(TOKENS, ends=True)),
        resume(llm, said(7)),
        resume(llm, []),
    )
    assert list(found) == [WHOLE] * 4
    assert len(core.added) == 3, "one had nothing left to say"
    llm.assert_idle()
    await llm.stop()


@pytest.mark.parametrize("traced", [False, True])
async def test_a_stream_at_its_end_needs_neither_prefill_nor_engine(traced: bool) -> None:
    core, prefill, planner = Core(), PrefillSide(), Planner("p")
    llm = Frontend(core, planner, prefill)
    llm.output_processor = OutputProcessor(None, log_stats=True, tracing_enabled=traced)
    assert await resume(llm, said(TOKENS, ends=True)) == WHOLE
    assert (core.added, prefill.asked, planner.planned) == ([], [], [])
    assert llm.output_processor.tracing_enabled == traced
    llm.assert_idle()
    await llm.stop()


@pytest.mark.parametrize("prefill", [None, "p"])
async def test_the_planner_learns_the_whole_answer_of_a_resumed_stream(prefill: str | None) -> None:
    planner = Planner(prefill, LATE_S)
    llm = Frontend(Core(), planner)
    assert await resume(llm, said(5)) == WHOLE
    assert planner.over == [("r", WHOLE[0])]
    await llm.stop()


@pytest.mark.parametrize(
    ("first", "second", "told"), [(2, 3, 2), (3, 2, 2), (0, 3, 0), (2**31 - 1, 1, 1)]
)
async def test_a_resumed_streams_cached_tokens_are_those_that_no_engine_computed(
    first: int, second: int, told: int
) -> None:
    llm = Frontend(Core(cached_tokens=second))
    outputs = said(3)
    outputs[0] = (replace(outputs[0][0], cached=first),)
    assert await resume(llm, outputs) == WHOLE
    assert set(llm.cached_tokens) == {told}
    recorder = RECORDER.get()
    assert recorder is not None
    again = decode_lines(recorder.take())
    assert again[:3] == outputs, "the lines are the same for whoever resumes the stream next"
    assert cached_tokens_of(again) == first
    await llm.stop()


async def test_what_a_prefill_engine_computed_is_not_cached() -> None:
    llm = Frontend(Core(cached_tokens=3), Planner("p"))
    assert await resume(llm, []) == WHOLE
    assert set(llm.cached_tokens) == {RESULT.cached_tokens} == {0}
    recorder = RECORDER.get()
    assert recorder is not None and cached_tokens_of(decode_lines(recorder.take())) == 0
    await llm.stop()


async def test_a_new_streams_first_line_has_its_cached_tokens() -> None:
    llm = Frontend(Core(cached_tokens=3))
    await resume(llm, [])
    recorder = RECORDER.get()
    assert recorder is not None
    lines = decode_lines(recorder.take())
    assert [one[0].cached for one in lines] == [3] + [0] * (len(lines) - 1)
    await llm.stop()


@pytest.mark.parametrize("kv", ["comes", "never", "fails"])
async def test_choices_that_had_ended_are_not_added_by_any_submission(kv: str) -> None:
    core = Core(kv)
    llm = Frontend(core, Planner("p", LATE_S))
    outputs = said(TOKENS, 0, ends=True) + said(4, 1)
    assert await resume(llm, outputs, n=3) == dict.fromkeys(range(3), WHOLE[0])
    assert all(not name.startswith("0_") for name in core.added)
    assert len(core.added) == len(set(core.added))
    await until(lambda: not core.running)
    llm.assert_idle()
    await llm.stop()


async def test_the_usage_of_a_request_knows_the_states_of_its_choices() -> None:
    llm, usage = Frontend(Core(cached_tokens=3)), PromptUsage()
    USAGE.set(usage)
    assert await resume(llm, [], n=3) == dict.fromkeys(range(3), WHOLE[0])
    assert await resume(llm, [], "one") == WHOLE
    [(name, states)] = usage.samples.items()
    assert name == "r" and [state.request_index for state in states] == [0, 1, 2]
    await llm.stop()


async def test_the_engines_client_does_not_keep_the_frontend() -> None:
    core = Core()
    llm = Frontend(core)
    assert await resume(llm, said(5)) == WHOLE
    await llm.stop()
    core.fail = print  # the fake held it
    found = weakref.ref(llm)
    del llm
    gc.collect()
    assert found() is None and core.added


@pytest.mark.parametrize("kv", ["comes", "never"])
@pytest.mark.parametrize("wait_s", [0.0, 0.001, LATE_S, 2 * LATE_S])
async def test_a_client_that_leaves_leaves_nothing_behind(kv: str, wait_s: float) -> None:
    core = Core(kv, runs=False)
    llm = Frontend(core, Planner("p", LATE_S))
    answering = asyncio.create_task(resume(llm, said(1000), max_tokens=2000))
    await asyncio.sleep(wait_s)
    answering.cancel()
    await asyncio.wait({answering})
    assert answering.cancelled()
    await asyncio.sleep(0)
    llm.assert_idle()
    await llm.stop()


async def test_kv_of_a_request_that_the_engine_never_gets_is_released() -> None:
    core = Core(runs=False)
    llm = Frontend(core, Planner("p"))
    lies: list[EmittedOutput] = [(EmittedChoice(0, (5000,)),)]
    with pytest.raises(VLLMValidationError, match="vocabulary"):
        await resume(llm, lies)
    assert (core.added, core.released) == ([], [PULL])

    answering = asyncio.create_task(resume(llm, said(3000), max_tokens=3005))
    await until(lambda: llm.output_processor.request_states)
    answering.cancel()
    await asyncio.wait({answering})
    assert (core.added, core.released) == ([], [PULL, PULL])

    answering = asyncio.create_task(resume(llm, said(3)))
    await until(lambda: core.added)
    answering.cancel()
    await asyncio.wait({answering})
    assert core.released == [PULL, PULL], "the engine has it, and tells the other by itself"
    llm.assert_idle()
    await llm.stop()


async def test_choices_that_the_engine_has_are_aborted_when_another_cannot_be_added() -> None:
    core = Core(runs=False)
    plain = core.add_request_async

    async def second_fails(request: Any) -> None:
        if core.added:
            raise RuntimeError("the engine does not take it")
        await plain(request)

    core.add_request_async = second_fails  # type: ignore[method-assign]
    llm = Frontend(core)
    with pytest.raises(EngineGenerateError):
        await resume(llm, said(2), n=2)
    assert len(core.added) == 1
    llm.assert_idle()
    await llm.stop()


async def test_an_end_by_a_stop_string_that_is_not_there_is_refused_by_name() -> None:
    llm = Frontend(Core())
    lies: list[EmittedOutput] = [(EmittedChoice(0, (1,), finish="stop", stop="END"),)]
    with pytest.raises(VLLMValidationError, match="'END'"):
        await resume(llm, lies)
    llm.assert_idle()
    await llm.stop()


# Seeds


@pytest.mark.parametrize(
    ("method", "drafter"),
    [(None, None), ("custom_class", None), ("ngram", "ngram"), ("suffix", "suffix")],
)
def test_drafters_of_vllms_are_known(method: str | None, drafter: str | None) -> None:
    config: Any = SimpleNamespace(
        speculative_config=None if method is None else SimpleNamespace(method=method)
    )
    assert vllm_drafter(config) == drafter


async def test_a_seed_and_a_drafter_of_vllms_are_not_resumed_and_the_stream_says_so() -> None:
    llm = Frontend(Core())
    llm._drafter = "ngram"
    recorder = OutputRecorder()
    RECORDER.set(recorder)
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    for seed, temperature, refused in ((1, 1.0, True), (None, 1.0, False), (1, 0.0, False)):
        params = SamplingParams(max_tokens=2, seed=seed, temperature=temperature)
        recorder = OutputRecorder()
        RECORDER.set(recorder)
        async for _ in llm.generate(prompt, params, "r"):
            pass
        assert (b"ngram" in recorder.take()) == refused
    with pytest.raises(VLLMValidationError, match="ngram"):
        await resume(llm, said(2), seed=1, temperature=1.0)
    assert await resume(llm, said(2), seed=1, temperature=0.0) == WHOLE
    await llm.stop()


async def test_a_greedy_request_with_a_seed_is_resumed_however_long_it_is() -> None:
    had = output_replay.MAX_SEEDED + 10
    llm = Frontend(Core())
    whole = {0: text(PROMPT, had + 2)}
    found = await resume(llm, said(had), max_tokens=had + 2, seed=1, temperature=0.0)
    assert found == whole
    with pytest.raises(VLLMValidationError, match="seed"):
        await resume(llm, said(had), max_tokens=had + 2, seed=1)
    await llm.stop()

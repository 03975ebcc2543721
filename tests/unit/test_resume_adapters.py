"""A stream resumes with the content of the LoRA adapter with which it began, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from headrace_decode.llm.engine_request import EngineRequest
from headrace_decode.llm.planned_llm import PlannedLLM
from headrace_decode.resume.emitted import (
    EmittedChoice,
    adapter_of,
    cached_tokens_of,
    decode_lines,
    encode_line,
)
from headrace_decode.resume.recorder import RECORDER, OutputRecorder
from headrace_engine.adapters.registry import AdapterVersion
from headrace_engine.adapters.snapshots import snapshot_root
from headrace_engine.vllm.llm import lora_request

OLD, NEW = "0" * 32, "1" * 32


def version(digest: str, number: int) -> AdapterVersion:
    return AdapterVersion("sql", number, digest, "/sql", str(snapshot_root() / digest))


def request(digest: str | None) -> EngineRequest:
    lora = None if digest is None else lora_request(version(digest, 2))
    prompt = {"prompt_token_ids": [1, 2]}
    return EngineRequest(prompt, SamplingParams(), "r", {"lora_request": lora})


@pytest.fixture
def recorder() -> Iterator[OutputRecorder]:
    made = OutputRecorder()
    before = RECORDER.set(made)
    yield made
    RECORDER.reset(before)


def llm(*versions: AdapterVersion) -> Any:
    known = {(each.name, each.digest): each for each in versions}
    made = PlannedLLM.__new__(PlannedLLM)
    made.shutdown = lambda *args, **kwargs: None  # type: ignore[method-assign]
    made.adapters = SimpleNamespace(  # type: ignore[assignment]
        version=lambda name, digest: known.get((name, digest))
    )
    return made


def began_with(recorder: OutputRecorder, digest: str) -> None:
    recorder.earlier = [(EmittedChoice(0, (5,), adapter=digest),)]


def test_a_line_tells_the_adapter_and_one_without_is_as_before() -> None:
    line = encode_line((EmittedChoice(0, (5,), cached=3, adapter=OLD),))
    outputs = decode_lines(line)
    assert (adapter_of(outputs), cached_tokens_of(outputs)) == (OLD, 3)
    assert encode_line((EmittedChoice(0, (5,)),)) == b':hr [{"i":0,"t":[5]}]\n\n'
    assert adapter_of([]) == ""


def test_a_new_request_records_its_adapter(recorder: OutputRecorder) -> None:
    asked = request(NEW)
    assert llm()._with_earlier_adapter(asked) is asked
    assert recorder.adapter == NEW


def test_a_stream_goes_on_with_the_same_content(recorder: OutputRecorder) -> None:
    began_with(recorder, NEW)
    asked = request(NEW)
    assert llm()._with_earlier_adapter(asked) is asked


def test_a_stream_goes_on_with_the_content_that_was_replaced(recorder: OutputRecorder) -> None:
    began_with(recorder, OLD)
    resumed = llm(version(OLD, 1))._with_earlier_adapter(request(NEW))
    assert (resumed.adapter_digest, resumed.adapter.lora_int_id) == (OLD, 1)
    assert recorder.adapter == OLD


@pytest.mark.parametrize(("began", "asked"), [(OLD, NEW), (OLD, None), ("", NEW)])
def test_a_stream_whose_content_is_not_here_does_not_go_on(
    recorder: OutputRecorder, began: str, asked: str | None
) -> None:
    began_with(recorder, began)
    with pytest.raises(VLLMValidationError, match="its LoRA adapter was replaced"):
        llm()._with_earlier_adapter(request(asked))

"""Prompts with images: prefilled by one engine and decoded by one of another process over NIXL,
stored and found again, and resumed. The answers are plain vLLM's, token for token."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER
from headrace_engine.kv_transfer.handoff import produce_params
from tests.support.cross_layer_models import BLOCK
from tests.support.machine import until
from tests.support.tiny_vision import tiny_vision
from tests.support.vision_engines import VisionEngines

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

ANSWER = 12
PICTURE = {"idefics3": 94, "paddleocr": 42}
"""Tokens of a picture, with the markers between its tiles, by model."""
BEFORE = 2 * BLOCK
"""Tokens of text before the picture, at least; equal in all prompts."""
PROMPTS: list[dict[str, Any]] = [{"text": "x" * BEFORE, "seed": seed} for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[VisionEngines, VisionEngines]]:
    """For a prefill engine and for a decode engine."""
    both = VisionEngines(), VisionEngines()
    try:
        yield both
    finally:
        for each in both:
            each.end()


@pytest.fixture(scope="module", params=["idefics3", "paddleocr"])
def kind(request: pytest.FixtureRequest) -> str:
    """The model. PaddleOCR-VL has M-RoPE: positions that depend on the pictures' sizes."""
    return str(request.param)


@pytest.fixture(scope="module")
def plain(processes: tuple[VisionEngines, VisionEngines], kind: str) -> list[dict[str, Any]]:
    """Plain vLLM's answers."""
    _, decode = processes
    decode.do("open", model=str(tiny_vision(kind)))
    found: list[dict[str, Any]] = decode.do("answers", prompts=PROMPTS, max_tokens=ANSWER)
    assert decode.do("encoded") == len(PROMPTS)
    assert len({tuple(each["tokens"]) for each in found}) == len(PROMPTS), "it does not look"
    return found


def test_a_prompt_with_a_picture_is_pulled_and_answered_as_if_it_was_computed(
    processes: tuple[VisionEngines, VisionEngines], kind: str, plain: list[dict[str, Any]]
) -> None:
    prefill, decode = processes
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(
                lambda engines: engines.do("open", model=str(tiny_vision(kind)), hands_over=True),
                processes,
            )
        )

    def pulled(order: list[int]) -> list[dict[str, Any]]:
        """The answers with the KV of the prompts in this order."""
        assert decode.do("forget")
        keep = [produce_params()] * len(PROMPTS)
        sent = decode.do("sent", prompts=PROMPTS)
        kept = prefill.do("answers", prompts=sent, max_tokens=1, transfers=keep)
        found: list[dict[str, Any]] = decode.do(
            "answers",
            prompts=PROMPTS,
            max_tokens=ANSWER,
            transfers=[kept[number]["transfer"] for number in order],
        )
        return found

    right = list(range(len(PROMPTS)))
    for answer, truth in zip(pulled(right), plain, strict=True):
        assert answer["cached"] >= answer["prompt_tokens"] - 1, "the decode engine computed a part"
        assert answer["tokens"] == truth["tokens"]
    assert prefill.do("encoded") == len(PROMPTS) and decode.do("encoded") == 0
    assert decode.do("transfers")["proved"] == len(PROMPTS)

    for answer, truth in zip(pulled([*right[1:], right[0]]), plain, strict=True):
        text = answer["prompt_tokens"] - PICTURE[kind]
        assert answer["cached"] < text, "KV of another picture behind the same tokens"
        assert answer["tokens"] == truth["tokens"]
    assert decode.do("encoded") == len(PROMPTS)
    assert decode.do("transfers")["unproved_reference"] == len(PROMPTS)


def test_stored_blocks_are_those_of_the_same_picture(
    processes: tuple[VisionEngines, VisionEngines],
    kind: str,
    plain: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    name = f"headrace-test-{uuid.uuid4().hex[:12]}"
    store = {"name": name, "folder": str(tmp_path), "dram_bytes": 64 << 20, "node": False}
    for engines in processes:
        engines.do("open", model=str(tiny_vision(kind)), store=store)
    writer, reader = processes
    [first] = writer.do("answers", prompts=PROMPTS[:1], max_tokens=ANSWER)
    assert first["tokens"] == plain[0]["tokens"] and first["cached"] == 0
    until(lambda: writer.do("forget"))  # its blocks are saved

    [same] = reader.do("answers", prompts=PROMPTS[:1], max_tokens=ANSWER)
    assert same["tokens"] == plain[0]["tokens"]
    assert same["cached"] == (same["prompt_tokens"] - 1) // BLOCK * BLOCK
    until(lambda: reader.do("forget"))
    [other] = reader.do("answers", prompts=PROMPTS[1:2], max_tokens=ANSWER)
    assert other["tokens"] == plain[1]["tokens"]
    assert BEFORE <= other["cached"] < other["prompt_tokens"] - PICTURE[kind]


def test_an_answer_about_a_picture_continues_in_another_engine(
    processes: tuple[VisionEngines, VisionEngines], kind: str, plain: list[dict[str, Any]]
) -> None:
    other, _ = processes
    other.do(
        "open",
        model=str(tiny_vision(kind)),
        worker_cls=EXTENSIBLE_WORKER,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[True],
    )
    earlier = [each["tokens"][:5] for each in plain]
    resumed = other.do("answers", prompts=PROMPTS, max_tokens=ANSWER, earlier=earlier)
    assert [each["tokens"] for each in resumed] == [each["tokens"][5:] for each in plain]

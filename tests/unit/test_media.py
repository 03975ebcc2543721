"""Images in prompts, by vLLM's own processing: their names by tenant, their way to another engine,
and everything that must tell one image from another."""

from __future__ import annotations

import asyncio
import io
import uuid
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm import SamplingParams

from headrace_decode.apis.prompt_usage import CachedTokens
from headrace_decode.llm.engine_request import EngineRequest, why_local
from headrace_decode.llm.plan_execution import PlanExecution
from headrace_decode.llm.planned_llm import PlannedLLM
from headrace_decode.resume.output_replay import why_not_resumable
from headrace_engine.connector.identity.adapters import BlockNames
from headrace_engine.kv_transfer import media
from headrace_engine.kv_transfer.handoff import PrefillRequest
from headrace_engine.kv_transfer.media import (
    encode_media,
    features_of,
    media_digest,
    planning_tokens,
    prompt_with_media,
    why_not_sent,
)
from headrace_engine.pull_proof.prompt_digests import PromptDigests
from headrace_engine.vllm.kv_cache import identifies_media
from headrace_engine.vllm.llm import process_media_by_tenant
from tests.support.tiny_vision import TILE_TOKENS, picture, tiny_vision

IMAGE_TOKENS = 5 * TILE_TOKENS
"""Of a picture of 200 x 160: four tiles and the whole."""


@cache
def config() -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = AsyncEngineArgs(
        model=str(tiny_vision()), dtype="float32", max_model_len=1024, enforce_eager=True
    )
    return args.create_engine_config()


class Frontend:
    """vLLM's renderer, as a frontend of a tenant has it."""

    def __init__(self) -> None:
        from vllm.renderers import renderer_from_config

        self.tenant: str | None = None
        self.renderer: Any = renderer_from_config(config())
        process_media_by_tenant(self, lambda: self.tenant)  # type: ignore[arg-type]

    def prompt(self, *parts: dict[str, Any] | str, tenant: str | None = None) -> Any:
        """Render a message."""
        from vllm.renderers import ChatParams

        content = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
        ]
        self.tenant = tenant
        messages: Any = [{"role": "user", "content": content}]
        rendered = self.renderer.render_chat_async(
            [messages], ChatParams(), self.renderer.default_chat_tok_params
        )
        _, [prompt] = asyncio.run(rendered)
        return prompt


@pytest.fixture(scope="module")
def frontend() -> Frontend:
    return Frontend()


def image(seed: int = 1, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture(seed)}, **fields}


def name(prompt: Any) -> str:
    [feature] = features_of(prompt)
    return feature.identifier


# ---- names --------------------------------------------------------------------------------------


def test_a_picture_has_one_name_for_a_tenant_and_others_for_others(frontend: Frontend) -> None:
    names = [name(frontend.prompt(image(), tenant=tenant)) for tenant in (None, "a", "b", "a")]
    assert names[1] == names[3]
    assert len(set(names)) == 3


def test_other_pictures_have_other_names_though_their_tokens_are_equal(frontend: Frontend) -> None:
    one, other = frontend.prompt(image(1)), frontend.prompt(image(2))
    assert one["prompt_token_ids"] == other["prompt_token_ids"]
    assert name(one) != name(other)


def test_the_name_that_a_client_gives_is_its_tenants_own(frontend: Frontend) -> None:
    named = image(1, uuid="logo")
    theirs = name(frontend.prompt(named, tenant="a"))
    assert "logo" not in theirs
    assert theirs == name(frontend.prompt({**named, "image_url": None}, tenant="a"))
    with pytest.raises((RuntimeError, ValueError)):
        frontend.prompt({**named, "image_url": None}, tenant="b")


def test_no_file_holds_a_name_that_vllm_takes() -> None:
    """vLLM asks for a `uuid.UUID` in the picture's EXIF data."""
    tag = Image.ExifTags.Base.ImageID
    exif = Image.Exif()
    exif[tag] = str(uuid.uuid4())
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "JPEG", exif=exif)
    kept = Image.open(io.BytesIO(file.getvalue())).getexif()[tag]
    assert isinstance(kept, str) and not isinstance(kept, uuid.UUID)


def test_vllm_numbers_media_only_if_it_caches_neither_blocks_nor_media() -> None:
    def engine(cache_gb: float, caches_blocks: bool) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(
                multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)
            ),
            cache_config=SimpleNamespace(enable_prefix_caching=caches_blocks),
        )

    assert identifies_media(engine(4, False)) and identifies_media(engine(0, True))
    assert not identifies_media(engine(0, False))


# ---- to another engine --------------------------------------------------------------------------


def test_a_repeated_picture_still_has_its_tensors(frontend: Frontend) -> None:
    first, again = frontend.prompt(image(3)), frontend.prompt(image(3))
    [one], [other] = features_of(first), features_of(again)
    assert one.data is not None and other.data is not None
    assert torch.equal(one.data["pixel_values"].data, other.data["pixel_values"].data)
    assert why_not_sent(again) is None


def test_another_engine_gets_the_same_prompt(frontend: Frontend) -> None:
    prompt = frontend.prompt("a ", image(1), " b ", image(2), " c", tenant="a")
    arrived: Any = prompt_with_media(prompt["prompt_token_ids"], encode_media(prompt))
    assert arrived["type"] == "multimodal"
    for key in ("prompt_token_ids", "mm_hashes", "mm_placeholders"):
        assert arrived[key] == prompt[key], key
    sent, got = features_of(prompt), features_of(arrived)
    assert len(sent) == len(got) == 2
    for ours, theirs in zip(sent, got, strict=True):
        assert theirs.mm_position.get_num_embeds() == IMAGE_TOKENS
        assert ours.data is not None and theirs.data is not None
        assert ours.data.keys() == theirs.data.keys()
        for key in ours.data:
            assert torch.equal(ours.data[key].data, theirs.data[key].data), key
            assert type(ours.data[key].field) is type(theirs.data[key].field), key
            assert ours.data[key].field.keep_on_cpu == theirs.data[key].field.keep_on_cpu, key


def test_media_that_do_not_fit_the_prompt_are_refused(frontend: Frontend) -> None:
    prompt = frontend.prompt(image())
    [feature] = features_of(prompt)
    end = feature.mm_position.offset + feature.mm_position.length
    encoded = encode_media(prompt)
    assert len(prompt_with_media([1] * end, encoded)["prompt_token_ids"]) == end
    for tokens in (0, end - 1):
        with pytest.raises(ValueError, match=f"ends at token {end} of a prompt of {tokens}"):
            prompt_with_media([1] * tokens, encoded)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x91\x80", b"\xc1" * 9])
def test_bytes_that_are_no_media_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        prompt_with_media([1] * 200, data)


def test_text_has_no_media() -> None:
    for prompt in ("text", {"prompt_token_ids": [1]}, {"type": "embeds"}):
        assert encode_media(prompt) == b"" == media_digest(features_of(prompt))
        assert why_not_sent(prompt) is None
    assert planning_tokens({"type": "token", "prompt_token_ids": [1, 2]}) == [1, 2]


def test_a_prefill_replica_is_sent_the_tensors_and_the_real_tokens(frontend: Frontend) -> None:
    sent: list[PrefillRequest] = []

    async def call(request: PrefillRequest) -> Any:
        sent.append(request)
        return SimpleNamespace(cached_tokens=0)

    def nothing(*_: Any) -> Any:
        raise AssertionError("the engine of the caller gets nothing here")

    parts: Any = (SimpleNamespace(verification=()), call, None, None)
    request = request_of(frontend.prompt("a", image(), tenant="a"))
    work = PlanExecution(*parts).work(request, nothing, nothing, CachedTokens(None), None)
    plan: Any = SimpleNamespace(compute_tokens=1, replica="p", plan_id="")
    asyncio.run(work.prefill(plan))
    [got] = sent
    ids = np.frombuffer(got.token_ids, "<i4").tolist()
    assert ids == request.token_ids != list(work.token_ids)
    arrived = features_of(prompt_with_media(ids, got.media))
    assert media_digest(arrived) == media_digest(features_of(request.prompt))


# ---- what stays ---------------------------------------------------------------------------------


def request_of(prompt: Any) -> EngineRequest:
    return EngineRequest(prompt, SamplingParams(), "r", {})


def test_a_prompt_with_a_picture_may_be_prefilled_remotely(frontend: Frontend) -> None:
    request = request_of(frontend.prompt("a", image(), "b"))
    assert why_local(request) is None
    assert request.has_media and not request.is_plain


def test_numbered_media_are_prefilled_where_they_are(frontend: Frontend) -> None:
    why = why_local(request_of(frontend.prompt(image())), identifies_media=False)
    assert why is not None and "numbers media" in why


def test_media_that_only_the_engine_has_are_prefilled_there(frontend: Frontend) -> None:
    prompt = frontend.prompt(image())
    for item in (None, {"address": SimpleNamespace(data=7)}):
        why = why_local(request_of({**prompt, "mm_kwargs": {"image": [item]}}))
        assert why is not None and "only in the memory" in why


def test_media_above_the_limit_are_prefilled_where_they_are(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = frontend.prompt(image())
    [feature] = features_of(prompt)
    assert feature.data is not None
    size = sum(elem.data.nbytes for elem in feature.data.values())
    monkeypatch.setattr(media, "MAX_MEDIA_BYTES", size)
    assert why_not_sent(prompt) is None
    monkeypatch.setattr(media, "MAX_MEDIA_BYTES", size - 1)
    assert "more than" in (why_not_sent(prompt) or "")


def test_stored_kv_is_not_blended_into_a_prompt_with_a_picture(frontend: Frontend) -> None:
    llm: Any = SimpleNamespace(blending=SimpleNamespace(mode="auto", budget=0.2))
    text = request_of({"type": "token", "prompt_token_ids": [1, 2, 3]})
    assert PlannedLLM._recompute_ratio(llm, text) == 0.2
    assert PlannedLLM._recompute_ratio(llm, request_of(frontend.prompt(image()))) is None


# ---- telling one picture from another -----------------------------------------------------------


def engine_request(prompt: Any) -> Any:
    """The engine's request, by vLLM's own input processing."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    processor = InputProcessor(config(), Frontend().renderer)
    core = processor.process_inputs("r", prompt, SamplingParams(max_tokens=1), ("generate",))
    return Request.from_engine_core_request(core, get_request_block_hasher(32, sha256_cbor))


def test_the_engines_request_has_the_names_that_the_frontend_has(frontend: Frontend) -> None:
    prompt = frontend.prompt("a", image(), tenant="a")
    request = engine_request(prompt)
    assert media_digest(request.mm_features) == media_digest(features_of(prompt)) != b""


def test_a_pull_is_proved_for_its_own_picture_only(frontend: Frontend) -> None:
    digests = PromptDigests(config())
    requests = [
        engine_request(frontend.prompt("a", image(seed), tenant=tenant))
        for seed, tenant in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))
    ]
    ids = requests[0].prompt_token_ids
    assert all(request.prompt_token_ids == ids for request in requests)
    ours, same, other, theirs = [digests.of(request, ids) for request in requests]
    assert None not in (ours, other, theirs)
    assert ours == same and len({ours, other, theirs}) == 3
    start = requests[0].mm_features[0].mm_position.offset
    before = {digests.of(request, ids[:start]) for request in requests}
    assert len(before) == 1, "the tokens before the picture depend on no picture"
    within = {digests.of(request, ids[: start + 1]) for request in requests}
    assert len(within) == 3


def test_a_pull_of_numbered_media_is_never_proved(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = engine_request(frontend.prompt("a", image()))
    monkeypatch.setattr(
        "headrace_engine.pull_proof.prompt_digests.identifies_media", lambda config: False
    )
    digests = PromptDigests(config())
    assert digests.of(request, request.prompt_token_ids) is None
    assert digests.of(request, request.prompt_token_ids[:3]) is not None, "the text before it"


def test_stored_blocks_are_found_by_the_same_picture_only(frontend: Frontend) -> None:
    names = BlockNames()
    prompts = [
        frontend.prompt("x" * 40, image(seed), tenant=tenant)
        for seed, tenant in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))
    ]
    found = [names.of_request(engine_request(prompt), 0, 4) for prompt in prompts]
    ours, same, other, theirs = found
    assert ours and ours == same
    assert other and theirs
    shared = [a == b for a, b in zip(ours, other, strict=True)]
    assert shared[0] and not shared[-1], "the text before the picture is shared"
    assert ours[-1] != theirs[-1]


def test_blocks_of_numbered_media_are_not_stored(frontend: Frontend) -> None:
    names = BlockNames(identifies_media=False)
    request = engine_request(frontend.prompt("x" * 40, image()))
    assert names.of_request(request, 0, None) is None and not names.identified(request)
    request.mm_features = []
    assert names.of_request(request, 0, None)


def test_a_planner_sees_another_prefix_for_another_picture(frontend: Frontend) -> None:
    one, other = frontend.prompt("a", image(1), "b"), frontend.prompt("a", image(2), "b")
    ids, first, second = one["prompt_token_ids"], planning_tokens(one), planning_tokens(other)
    [feature] = features_of(one)
    place = range(feature.mm_position.offset, feature.mm_position.offset + 94)
    for at, token in enumerate(ids):
        if at in place:
            assert first[at] != second[at] and 2**30 <= first[at] < 2**31
        else:
            assert first[at] == second[at] == token
    assert list(planning_tokens(one)) == list(first) and len(first) == len(ids)


# ---- resume -------------------------------------------------------------------------------------


def test_streams_with_media_that_have_names_can_be_resumed(frontend: Frontend) -> None:
    prompt, params = frontend.prompt(image()), SamplingParams()
    assert why_not_resumable(prompt, params) is None
    assert "content" in (why_not_resumable(prompt, params, identifies_media=False) or "")
    raw = {"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}
    assert "content" in (why_not_resumable(raw, params) or "")
    assert "plain text" in (why_not_resumable({"type": "embeds"}, params) or "")

"""Parts of vLLM's frontend (`AsyncLLM`) beyond its documented methods.

`tests/unit/test_contracts_decode.py`, `test_contracts_resume.py`, `test_contracts_adapters.py` and
`test_contracts_store.py` pin what is used here.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from weakref import WeakMethod

from vllm.inputs import MultiModalInput, mm_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems
from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from headrace_engine.adapters.registry import AdapterVersion
from headrace_engine.adapters.sources import AdapterError
from headrace_engine.connector.retention import ACTION_TYPE, ACTION_VERSION, SECONDS
from headrace_engine.kv_groups import BlockUse

__all__ = ["RENDERER_REGISTRY", "HfRenderer"]

_MODALITIES = ("image", "video", "audio")
_TENANT_FACTOR = "headrace_tenant"
_HINTS_VERSION = "1"
"""Version of the envelope of KV hints, which vLLM does not look at."""
_ALL_INLINE = 2**62
"""Bytes from which vLLM's encoder puts a tensor into a message of its own."""

SendRequest = Callable[[Any], Awaitable[None]]


def intercept_requests(
    llm: AsyncLLM, submit: Callable[[Any, SendRequest], Awaitable[None]]
) -> None:
    """Have a frontend pass each request for its engine to `submit`.

    vLLM sends the choices of a request to the engine one after the other, in the order of their
    indices. By then its output processor has all of them. A client's cancellation of the request
    reaches `submit`.

    Args:
        submit: a method of `llm`. It gets the request of one choice (vLLM's `EngineCoreRequest`),
            and the function that sends a request to the engine.
    """
    core: Any = llm.engine_core
    send: SendRequest = core.add_request_async
    # A task of the engine's client runs until the frontend is collected, so the client must not
    # hold the frontend.
    method = WeakMethod(submit)

    async def add_request_async(request: Any) -> None:
        found = method()
        assert found is not None, "the caller holds the frontend"
        await found(request, send)

    core.add_request_async = add_request_async


def with_retention(options: dict[str, Any], seconds: float, request_id: str) -> dict[str, Any]:
    """Return the arguments of `AsyncLLM.generate` with the hint to retain a request's KV
    (`connector.retention`); unchanged for 0 seconds.

    Args:
        options: the other arguments; actions in their hints stay.
    """
    if seconds <= 0.0:
        return options
    given = options.get("kv_hints") or KvHintsEnvelope(_HINTS_VERSION, request_id, [])
    action = KvHintAction(request_id, ACTION_TYPE, ACTION_VERSION, {SECONDS: seconds})
    hints = KvHintsEnvelope(given.protocol_version, given.message_id, [*given.actions, action])
    return {**options, "kv_hints": hints}


def skip_grammar_parsing(llm: AsyncLLM) -> None:
    """Keep a frontend from parsing the grammars of requests on its event loop."""
    llm.input_processor.structured_outputs_config = None  # type: ignore[assignment]


def process_media_by_tenant(llm: AsyncLLM, tenant: Callable[[], str | None]) -> None:
    """Have a frontend keep processed media, and give them names of their tenant.

    vLLM's default cache leaves the tensors of a medium that the engine has seen with the engine.
    With this change, the tensors are also in the rendered prompt, so another engine can get them,
    and a request that ends before the engine gets it leaves no entry for a medium that the engine
    lacks.

    vLLM hashes a medium's content (or the name that its client gave it) together with the options
    for its loader. The tenant becomes one of these options after the loading, so all caches of
    media know a medium by tenant: those of processed media and of the encoder, and KV blocks.

    Args:
        tenant: returns a digest of the current request's tenant; None without tenants.
    """
    renderer: Any = llm.renderer
    if isinstance(renderer._mm_processor_cache, LruKeyReplicatedSenderCache):
        renderer._mm_processor_cache = renderer._mm_processor_only_cache
    process = renderer._process_multimodal_async

    def process_by_tenant(*args: Any, media_io_kwargs: Any = None, **kwargs: Any) -> Any:
        name, options = tenant(), dict(media_io_kwargs or {})
        if name is not None:
            options |= {m: {**(options.get(m) or {}), _TENANT_FACTOR: name} for m in _MODALITIES}
        return process(*args, media_io_kwargs=options, **kwargs)

    renderer._process_multimodal_async = process_by_tenant


def encode_features(features: Iterable[Any]) -> bytes:
    """Return processed media as bytes, in the form that vLLM's frontends send to their engines.

    Args:
        features: with the fields of `MultiModalFeatureSpec`.
    """
    made = [
        MultiModalFeatureSpec(
            data=each.data,
            modality=each.modality,
            identifier=each.identifier,
            mm_position=each.mm_position,
            mm_hash=each.identifier,
        )
        for each in features
    ]
    [encoded] = MsgpackEncoder(size_threshold=_ALL_INLINE).encode(made)
    return bytes(encoded)


def decode_features(data: bytes) -> list[MultiModalFeatureSpec]:
    """Return the media that `encode_features` has encoded.

    Raises:
        Exception: the bytes are something else.
    """
    decoder = MsgpackDecoder(list[MultiModalFeatureSpec])
    found: list[MultiModalFeatureSpec] = decoder.decode(bytearray(data))  # torch wants to write
    return found


def multimodal_input(
    token_ids: Sequence[int], features: Iterable[MultiModalFeatureSpec]
) -> MultiModalInput:
    """Return an engine's input for a prompt with these media, in the order of their places."""
    names: dict[str, list[str]] = {}
    items: dict[str, list[Any]] = {}
    places: dict[str, list[Any]] = {}
    for each in features:
        names.setdefault(each.modality, []).append(each.identifier)
        items.setdefault(each.modality, []).append(each.data)
        places.setdefault(each.modality, []).append(each.mm_position)
    return mm_input(list(token_ids), MultiModalKwargsItems(items), names, places)


def request_state(llm: AsyncLLM, request_id: str) -> Any | None:
    """Return the frontend's state of a request that the engine has; None without one."""
    return llm.output_processor.request_states.get(request_id)


def cache_tokens(config: Any, use: BlockUse) -> float:
    """Return the number of one request's tokens that fit into an engine's KV cache; infinity if
    unknown.

    Args:
        use: blocks that a request takes.
    """
    cache = config.cache_config
    if not cache.num_gpu_blocks:
        return math.inf
    positions = use.positions(cache.num_gpu_blocks)
    return positions if math.isinf(positions) else int(positions) * int(cache.block_size)


def lora_request(version: AdapterVersion) -> LoRARequest:
    """Return vLLM's form of an adapter."""
    return LoRARequest(version.name, version.number, version.path)


class VllmAdapters:
    """The adapters of a started engine (`registry.AdapterEngine`).

    Args:
        llm: the engine's frontend. Its configuration has a `lora_config`.

    Attributes:
        capacity: number of adapters that the engine keeps.
        models: vLLM's `OpenAIServingModels`, once there is an application.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        config = llm.vllm_config.lora_config
        assert config is not None
        self._llm = llm
        self.capacity = int(config.max_cpu_loras or config.max_loras)
        self.models: Any = None

    async def load(self, version: AdapterVersion) -> None:
        """Have the engine load an adapter between two steps.

        Raises:
            AdapterError: the engine refuses it.
        """
        try:
            await self._llm.add_lora(lora_request(version))
        except Exception as error:
            if self._llm.errored:
                raise
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            raise AdapterError(first) from None

    def offer(self, version: AdapterVersion) -> None:
        """Register an adapter under its name with vLLM's application."""
        if self.models is not None:
            self.models.lora_requests[version.name] = lora_request(version)

    def withdraw(self, name: str) -> None:
        """Remove a name from vLLM's application."""
        if self.models is not None:
            self.models.lora_requests.pop(name, None)

"""The identity of an engine's KV, from vLLM's configuration alone.

`kv_identity` is the one function that computes it. The store's namespace, the proof of a pull
(`headrace_engine.pull_proof`) and the kind of a replica (`headrace_engine.kv_transfer.kv_kind`) are
made of it.

It is made of settings and of the content of files, not of the model's configuration object that
vLLM derives from both: some models change that object while they load, in the workers only. All
settings count except those that are listed here. So a setting that a later vLLM adds changes the
identity until it is listed.
"""

from __future__ import annotations

import inspect
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from headrace_engine.connector.identity.weights import (
    CONFIG_SUFFIXES,
    LOADER_SPEEDS,
    Unidentified,
    code_identity,
    file_digest,
    folder_fingerprint,
    weights_identity,
)
from headrace_engine.vllm.kv_cache import (
    cpu_attention_isa,
    hash_seed,
    model_settings,
    vllm_version,
)
from headrace_kvstore.codec import CODECS, Codec, Raw, tag
from headrace_kvstore.identity.namespace import KvIdentity, Namespace, canonical, fingerprint

SPARSE_SETTINGS_KEY = "headrace_sparse"
"""Key in vLLM's `additional_config`: how an engine attends sparsely
(`headrace_decode.attention.settings`). Its `page_tokens` are the attention kernel's block."""
COMPRESSION_SETTINGS_KEY = "headrace_compression"
"""Key there, too: how an engine compresses KV (`headrace_decode.compression.engine.settings`)."""
STATED = frozenset(
    {
        *("model", "model_weights", "revision", "code_revision", "dtype", "max_model_len"),
        *("hf_config", "hf_text_config", "hf_config_path", "hf_overrides", "multimodal_config"),
        *("override_generation_config", "word_embeddings_untied_by_checkpoint"),
    }
)
"""Fields of vLLM's ModelConfig that the identity covers in another way."""
UNRELATED = frozenset(
    {
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "seed"),
        *("served_model_name", "hf_token", "allowed_local_media_path", "allowed_media_domains"),
        *("enforce_eager", "disable_cascade_attn", "spec_target_max_model_len"),
        *("max_logprobs", "logprobs_mode", "logits_processors", "use_fp64_gumbel"),
        *("return_sampling_mask", "enable_trace_replay"),
        *("enable_prompt_embeds", "io_processor_plugin", "pooler_config", "renderer_num_workers"),
        *("enable_sleep_mode", "sleep_mode_backend", "enable_cumem_allocator"),
        *("sleep_preserve_parameter_names", "sleep_mode_offload_cudagraph"),
        "enable_nccl_comm_suspend",
        "allow_deprecated_quantization",
    }
)
"""Fields of vLLM's ModelConfig that do not change KV: tokenizer, sampling, memory, and how steps
are run."""
UNRELATED_MEDIA = frozenset(
    {
        *("limit_per_prompt", "enable_mm_embeds", "allow_missing_mm_embeddings"),
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
        *("mm_hasher_algorithm", "mm_encoder_only", "mm_encoder_tp_mode", "skip_mm_profiling"),
        *("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path"),
        *("mm_encoder_fp8_scale_save_margin", "interleave_mm_strings", "mm_tensor_ipc"),
        "mm_ipc_gpu_memory_gb",
    }
)
"""Such fields of its MultiModalConfig; the encoder's scales count by content."""
UNRELATED_ADAPTERS = frozenset(
    {
        *("max_loras", "max_cpu_loras", "fully_sharded_loras", "specialize_active_lora"),
        *("default_mm_loras", "max_lora_rank"),
    }
)
"""Such fields of its LoRAConfig, for requests with an adapter."""
UNRELATED_LOADING = frozenset(
    {
        *("model_loader_extra_config", "download_dir", "device", "use_tqdm_on_load"),
        *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
        "pt_load_map_location",
    }
)
"""Such fields of its LoadConfig."""
EPOCH_BYTES = 16


def kv_identity(vllm_config: Any) -> KvIdentity:
    """Compute the identity of an engine's KV. Reads the weights, unless another process of this
    machine has read them.

    Args:
        vllm_config: vLLM's VllmConfig.

    Raises:
        Unidentified: it is not known. Then the KV must be neither stored nor pulled.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    name, revision = weights_identity(model, load, vllm_config.parallel_config)
    settings = {
        **settings_identity(model, load),
        "skip_layers": list(vllm_config.cache_config.kv_cache_dtype_skip_layers),
        "platform": _platform_settings(vllm_config),
    }
    try:
        told = canonical({key: value for key, value in settings.items() if value})
    except TypeError as error:
        raise Unidentified(f"additional_config: {error}") from error
    return KvIdentity(
        model=name,
        revision=revision,
        settings=told,
        max_model_len=model.max_model_len,
        dtype=str(model.dtype),
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
        engine=f"vllm {vllm_version()} transformers {transformers.__version__}",
        device=device_identity(vllm_config),
    )


def settings_identity(model: Any, load: Any) -> dict[str, Any]:
    """Return the settings of a model that are not the default, without its weights.

    Args:
        model, load: vLLM's ModelConfig and LoadConfig.

    Raises:
        Unidentified: as `kv_identity`.
    """
    media = model.multimodal_config
    scales = getattr(media, "mm_encoder_fp8_scale_path", None)
    extra = load.model_loader_extra_config
    try:
        return {
            "model": model_settings(model, STATED | UNRELATED),
            "media": model_settings(media, UNRELATED_MEDIA),
            "media_scales": file_digest(Path(scales)) if scales else "",
            "overrides": overrides_identity(model.hf_overrides),
            "config": _config_identity(model),
            "code": code_identity(model),
            "load": model_settings(load, UNRELATED_LOADING),
            "load_extra": {k: v for k, v in dict(extra).items() if k not in LOADER_SPEEDS},
            # Llama 4 takes the setting from there.
            "temperature": (model.override_generation_config or {}).get("attn_temperature_tuning"),
            "mla": bool(model.use_mla),
        }
    except (OSError, TypeError) as error:
        raise Unidentified(f"a setting of the model cannot be told from others: {error}") from error


def first_epoch(vllm_config: Any) -> bytes:
    """Return the epoch of an engine that starts: empty, or an epoch of its own if a trainer may
    replace its weights at any time.

    Each reset of an engine's caches also begins an epoch of its own, because vLLM does not say
    whether the weights are still the loaded ones.
    """
    may_change = getattr(vllm_config, "weight_transfer_config", None) is not None
    return new_epoch() if may_change else b""


def new_epoch() -> bytes:
    """Make an epoch that no engine has had."""
    return secrets.token_bytes(EPOCH_BYTES)


def adapter_settings(vllm_config: Any) -> bytes:
    """Return an engine's settings for adapters that are not the default."""
    return canonical(model_settings(vllm_config.lora_config, UNRELATED_ADAPTERS)).encode()


def engine_namespace(
    vllm_config: Any,
    cache_layout: str | None,
    parts: int,
    layer_names: Sequence[str],
    codec: Codec | None = None,
) -> Namespace:
    """Return the namespace of an engine's blocks.

    Args:
        vllm_config: vLLM's VllmConfig.
        cache_layout: the engine's own name of its layout (`KVCacheConfig.kv_cache_layout`).
        parts: number of parts into which each layer of a block is cut.
        layer_names: layers whose KV a block holds, those of a draft model among them.
        codec: of the stored blocks; a lossy one has a namespace of its own.

    Raises:
        Unidentified: as `kv_identity`.
        ValueError: the engine's blocks cannot be shared; the text says why.
    """
    cache, codec = vllm_config.cache_config, codec or Raw()
    attention = vllm_config.attention_config.backend
    return Namespace(
        **vars(kv_identity(vllm_config)),
        layers=len(layer_names),
        speculative=speculative_identity(vllm_config, layer_names),
        parts=parts,
        block_tokens=cache.block_size,
        layout=f"{cache_layout or 'default'}/{attention.name if attention else 'default'}",
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_root=fingerprint(hash_seed(cache.prefix_caching_hash_algo)),
        codec=tag(codec),
        codec_version=codec.version,
        technique=tag(codec) if codec.lossy else "",
    )


def lossy_codec(transfer: Any) -> str:
    """Return the lossy codec of the store in an engine's connectors; empty if KV stays exact.

    Args:
        transfer: vLLM's KVTransferConfig, or None.
    """
    names = [str(each.get("codec", "raw")) for each in connector_settings(transfer)]
    return next((name for name in names if name in CODECS and CODECS[name].lossy), "")


def connector_settings(transfer: Any) -> list[dict[str, Any]]:
    """Return the settings of an engine's connector, and of those within it.

    Args:
        transfer: vLLM's KVTransferConfig, or None.
    """
    extra = (transfer and transfer.kv_connector_extra_config) or {}
    children = extra.get("connectors", ())
    return [extra] + [child.get("kv_connector_extra_config") or {} for child in children]


def overrides_identity(overrides: Any) -> str:
    """Return `hf_overrides` as text that is equal only for equal overrides.

    A function is identified by its name and source. Raises Unidentified if the source does not
    determine its behaviour: no source, a closure, default arguments, or another callable.
    """

    def named(value: Any) -> Any:
        try:
            if not inspect.isfunction(value) or value.__closure__ or value.__defaults__:
                raise TypeError("not a function that stands by itself")
            return [value.__module__, value.__qualname__, inspect.getsource(value)]
        except (OSError, TypeError) as error:
            raise Unidentified(
                f"hf_overrides: {value!r} cannot be told from others ({error}); give values, or a "
                "function of a module without a closure or default arguments"
            ) from error

    if not overrides:
        return ""
    return json.dumps(
        overrides, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=named
    )


def speculative_identity(vllm_config: Any, layer_names: Sequence[str]) -> str:
    """Return the draft model that some of these layers belong to; empty if there is none."""
    own = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    speculative = vllm_config.speculative_config
    if speculative is None or len(layer_names) <= own:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return canonical([speculative.method])
    load = vllm_config.load_config
    weights = weights_identity(draft, load, vllm_config.parallel_config)
    return canonical([speculative.method, *weights, settings_identity(draft, load)])


def speculative_heads(vllm_config: Any) -> int:
    """Return the number of KV heads of the draft model; 0 if there is none."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return int(draft.get_total_num_kv_heads()) if draft is not None else 0


def device_identity(vllm_config: Any) -> str:
    """Return the device kind; on CPUs also the instruction set for which keys are packed, and the
    attention kernel's block size with sparse attention."""
    kind = str(vllm_config.device_config.device_type)
    if kind != "cpu":
        return kind
    model, cache = vllm_config.model_config, vllm_config.cache_config
    page = sparse_page_tokens(vllm_config)
    tokens = page or cache.block_size
    isa = cpu_attention_isa(model.dtype, tokens, model.get_head_size(), cache.cache_dtype)
    return f"cpu/{isa}/{page}" if page else f"cpu/{isa}"


def sparse_page_tokens(vllm_config: Any) -> int:
    """Return the tokens of the attention kernel's block in an engine with sparse attention; 0 in
    others."""
    told = getattr(vllm_config, "additional_config", None)
    sparse = told.get(SPARSE_SETTINGS_KEY) if isinstance(told, Mapping) else None
    return int(sparse["page_tokens"]) if sparse else 0


def _config_identity(model: Any) -> str:
    """Return the identity of the model's configuration if it is not in the weights' folder; else
    empty."""
    place = model.hf_config_path
    if not place or place == model.model:
        return ""
    if Path(place).is_dir():
        return folder_fingerprint(Path(place), CONFIG_SUFFIXES)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise Unidentified(f"hf_config_path: the commit of {place} is not known; give a folder")
    return f"{place} {commit}"


def _platform_settings(vllm_config: Any) -> Any:
    """Return `additional_config` without the techniques, whose requests have salts of their own."""
    told = getattr(vllm_config, "additional_config", None) or {}
    if not isinstance(told, Mapping):
        return told.compute_hash()
    return {key: value for key, value in told.items() if not str(key).startswith("headrace_")}

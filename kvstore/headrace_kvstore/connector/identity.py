"""The namespace of an engine's KV blocks, from vLLM's configuration alone.

Both halves of a connector, and engines on other machines, derive the same namespace without asking
each other. Weights in a folder are identified by a fingerprint of their files, wherever the folder
is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from headrace_kvstore._vllm_compat import cpu_attention_isa, hash_seed, vllm_version
from headrace_kvstore.codec import Codec, Raw, tag
from headrace_kvstore.keys import Namespace, canonical, fingerprint

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def engine_namespace(
    vllm_config: Any, cache_layout: str | None, rank: int, codec: Codec | None = None
) -> Namespace:
    """The namespace of one worker's blocks.

    Args:
        vllm_config: vLLM's VllmConfig.
        cache_layout: the engine's own name of its layout (`KVCacheConfig.kv_cache_layout`).
        rank: of the worker among the tensor-parallel ones.
        codec: that blocks are stored under; a lossy one has a namespace of its own.

    Raises:
        ValueError: the engine's blocks cannot be shared; the text says why.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    for kind in ("pipeline_parallel", "prefill_context_parallel", "decode_context_parallel"):
        if getattr(parallel, f"{kind}_size") > 1:
            raise ValueError(f"the KV store does not serve engines with {kind}_size above 1")
    name, revision = model_identity(model)
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
    codec = codec or Raw()
    attention = vllm_config.attention_config.backend
    return Namespace(
        model=name,
        revision=revision,
        quantization=model.quantization or "",
        overrides=canonical(overrides) if overrides else "",
        dtype=str(model.dtype),
        kv_cache_dtype=cache.cache_dtype,
        tp_rank=rank,
        tp_size=parallel.tensor_parallel_size,
        block_tokens=cache.block_size,
        engine=f"vllm {vllm_version()}",
        layout=f"{cache_layout or 'default'}/{attention.name if attention else 'default'}",
        device=device_identity(vllm_config),
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_root=fingerprint(hash_seed(cache.prefix_caching_hash_algo)),
        codec=tag(codec),
        codec_version=codec.version,
        technique=tag(codec) if codec.lossy else "",
    )


def model_identity(model: Any) -> tuple[str, str]:
    """Name and revision of a model: a folder's weights, or a hub id and its commit."""
    folder = Path(model.model)
    if folder.is_dir():
        return "/".join(model.hf_config.architectures or ["?"]), weights_fingerprint(folder)
    commit = getattr(model.hf_config, "_commit_hash", None)
    return model.model, str(commit or model.revision or "")


def weights_fingerprint(folder: Path) -> str:
    """A digest of a model folder's files, 16 hex digits, without reading all of their bytes.

    Names, sizes, and of each file its head, its tail and 62 places spread between them: enough to
    tell checkpoints of one architecture apart, since training moves all of the weights.
    """
    digest = hashlib.blake2b(digest_size=8)
    suffixes = {".safetensors", ".bin", ".gguf", ".json", ".pt"}
    for path in sorted(p for p in folder.iterdir() if p.suffix in suffixes):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def device_identity(vllm_config: Any) -> str:
    """Device kind, and on CPUs the instruction set that keys are packed for."""
    kind = str(vllm_config.device_config.device_type)
    if kind != "cpu":
        return kind
    model, cache = vllm_config.model_config, vllm_config.cache_config
    isa = cpu_attention_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return f"cpu/{isa}"

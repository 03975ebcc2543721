"""The namespace of an engine's KV blocks, from vLLM's configuration alone.

Both halves of a connector, and engines on other machines, derive the same namespace without asking
each other. Weights in a folder are identified by a fingerprint of their files, wherever the folder
is.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace_kvstore._vllm_compat import cpu_attention_isa, hash_seed, vllm_version
from headrace_kvstore.codec import CODECS, Codec, Raw, tag
from headrace_kvstore.keys import Namespace, canonical, fingerprint

SPARSE_KEY = "headrace_sparse"
"""In vLLM's `additional_config`: how an engine attends sparsely
(`headrace_decode.sparse.engine.settings`). Its `unit_tokens` are the attention kernel's block."""
BOUNDED_KEY = "headrace_bounded"
"""There, too: how it bounds contexts (`headrace_decode.bounded.engine.settings`)."""
_READERS = 8
"""Threads that read weights; hashing releases Python's lock."""


def engine_namespace(
    vllm_config: Any,
    cache_layout: str | None,
    parts: int,
    layer_names: Sequence[str],
    codec: Codec | None = None,
) -> Namespace:
    """The namespace of an engine's blocks.

    Args:
        vllm_config: vLLM's VllmConfig.
        cache_layout: the engine's own name of its layout (`KVCacheConfig.kv_cache_layout`).
        parts: into which each layer of a block is cut.
        layer_names: layers whose KV a block holds, those of a draft model among them.
        codec: that blocks are stored under; a lossy one has a namespace of its own.

    Raises:
        ValueError: the engine's blocks cannot be shared; the text says why.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    name, revision = model_identity(model)
    codec = codec or Raw()
    attention = vllm_config.attention_config.backend
    return Namespace(
        model=name,
        revision=revision,
        quantization=model.quantization or "",
        overrides=overrides_identity(model.hf_overrides),
        layers=len(layer_names),
        speculative=speculative_identity(vllm_config, layer_names),
        dtype=str(model.dtype),
        kv_cache_dtype=cache.cache_dtype,
        parts=parts,
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


def lossy_codec(transfer: Any) -> str:
    """The lossy codec of the store in an engine's connectors; empty where KV stays exact.

    Args:
        transfer: vLLM's KVTransferConfig, or None.
    """
    names = [str(each.get("codec", "raw")) for each in connector_settings(transfer)]
    return next((name for name in names if name in CODECS and CODECS[name].lossy), "")


def connector_settings(transfer: Any) -> list[dict[str, Any]]:
    """Settings of an engine's connector, and of those within it.

    Args:
        transfer: vLLM's KVTransferConfig, or None.
    """
    extra = (transfer and transfer.kv_connector_extra_config) or {}
    children = extra.get("connectors", ())
    return [extra] + [child.get("kv_connector_extra_config") or {} for child in children]


def model_identity(model: Any) -> tuple[str, str]:
    """Name and revision of a model: a folder's weights, or a hub id and its commit."""
    folder = Path(model.model)
    if folder.is_dir():
        return "/".join(model.hf_config.architectures or ["?"]), weights_fingerprint(folder)
    commit = getattr(model.hf_config, "_commit_hash", None)
    return model.model, str(commit or model.revision or "")


def weights_fingerprint(folder: Path) -> str:
    """A digest of all bytes of a model folder's files, 16 hex digits.

    A file is read once a machine: its digest is kept in the user's cache under its path, size,
    inode and time of change.
    """
    suffixes = {".safetensors", ".bin", ".gguf", ".json", ".pt"}
    paths = sorted(p for p in folder.iterdir() if p.suffix in suffixes)
    digest = hashlib.blake2b(digest_size=8)
    with ThreadPoolExecutor(_READERS) as readers:
        for path, of_file in zip(paths, readers.map(_file_digest, paths), strict=True):
            digest.update(f"{path.name}\0{of_file}\0".encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    about = path.stat()
    facts = path.resolve(), about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns
    name = hashlib.blake2b("\0".join(map(str, facts)).encode(), digest_size=16).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    kept = cache / "headrace" / "fingerprints" / name
    with suppress(OSError, RuntimeError):
        known = kept.read_text()
        if len(known) == 32:
            return known
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    with suppress(OSError, RuntimeError):  # a cache that cannot be written
        kept.parent.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(found)
        half.replace(kept)
    return found


def overrides_identity(overrides: Any) -> str:
    """`hf_overrides` as text that is equal only for equal overrides.

    A function is known by its name and source. Raises ValueError for one whose source does not say
    all that it does: no source, a closure, or another callable.
    """

    def named(value: Any) -> Any:
        try:
            if not inspect.isfunction(value) or value.__closure__ or value.__defaults__:
                raise TypeError("not a function that stands by itself")
            return [value.__module__, value.__qualname__, inspect.getsource(value)]
        except (OSError, TypeError) as error:
            raise ValueError(
                f"hf_overrides: {value!r} cannot be told from others ({error}); give values, or a "
                "function of a module without a closure or default arguments"
            ) from error

    if not overrides:
        return ""
    return json.dumps(
        overrides, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=named
    )


def speculative_identity(vllm_config: Any, layer_names: Sequence[str]) -> str:
    """Which draft model some of these layers belong to; empty where all are the model's own."""
    own = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    speculative = vllm_config.speculative_config
    if speculative is None or len(layer_names) <= own:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    model = model_identity(draft) if draft is not None else ("?", "")
    return canonical([speculative.method, *model])


def speculative_heads(vllm_config: Any) -> int:
    """KV heads of the draft model; 0 where there is none."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return int(draft.get_total_num_kv_heads()) if draft is not None else 0


def device_identity(vllm_config: Any) -> str:
    """Device kind; on CPUs the instruction set that keys are packed for, too, and the attention
    kernel's block where it is not the scheduler's."""
    kind = str(vllm_config.device_config.device_type)
    if kind != "cpu":
        return kind
    model, cache = vllm_config.model_config, vllm_config.cache_config
    unit = sparse_unit_tokens(vllm_config)
    tokens = unit or cache.block_size
    isa = cpu_attention_isa(model.dtype, tokens, model.get_head_size(), cache.cache_dtype)
    return f"cpu/{isa}/{unit}" if unit else f"cpu/{isa}"


def sparse_unit_tokens(vllm_config: Any) -> int:
    """Tokens of the attention kernel's block in an engine with sparse attention; 0 in others."""
    told = getattr(vllm_config, "additional_config", None)
    sparse = told.get(SPARSE_KEY) if isinstance(told, Mapping) else None
    return int(sparse["unit_tokens"]) if sparse else 0

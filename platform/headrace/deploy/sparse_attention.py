"""Sparse attention and KV cache compression in an app's arguments: their settings for engines.

Both roles get the size of pages, which decides where bytes lie in the KV cache. Prefill engines
attend densely, since they compute prompts. KV is compressed where answers are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.config.calibration import FIELD, keep_ratio_of
from headrace.config.techniques import TechniquesSection
from headrace.deploy.worker_class import use_extension_worker
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine.settings import CompressionSettings


def add_sparse_attention(
    techniques: TechniquesSection,
    engines: list[dict[str, Any]],
    answering: Sequence[dict[str, Any]] = (),
) -> None:
    """Have engines attend sparsely, and bound contexts, where requests ask for it.

    Args:
        engines: `engine_kwargs` of all roles, with speculative decoding and blending in them;
            changed in place.
        answering: those of them whose KV may leave the cache or be dropped. A prefill engine's may
            not: decode engines pull it from there.

    Raises:
        ValueError: an engine has a worker class of its own, or the calibration cannot be used.
    """
    section, compression = techniques.sparse, techniques.compression
    modes = {"sparse": section.mode, "compression": compression.mode}
    used = [name for name, mode in modes.items() if mode != "off"]
    if not used:
        return
    settings = SparseSettings("off", page_tokens=section.page_tokens)
    if section.mode != "off":
        try:
            share = keep_ratio_of(section)
        except ValueError as error:
            raise ValueError(f"{FIELD}: {error}") from None
        settings = SparseSettings(section.mode, share, section.page_tokens, section.calibration)
    for engine in engines:
        use_extension_worker(engine, f"techniques.{used[0]}.mode")
        additional = dict(engine.get("additional_config") or {})
        additional |= settings.additional_config()
        if any(engine is each for each in answering):
            additional |= replace(settings, offload_gib=section.offload_gib).additional_config()
            if compression.mode != "off":
                additional |= CompressionSettings(
                    compression.mode,
                    compression.keep_ratio,
                    compression.calibration,
                    compression.incremental,
                ).additional_config()
        engine["additional_config"] = additional

"""The processed media (images, sound, video) of prompts: their identity, and their bytes for
another engine.

The replica that answers a request fetches, decodes and processes its media once. A prefill engine
gets the resulting tensors, so both engines compute with the same bytes, whatever an address gives
when it is fetched again.

vLLM names each medium by a hash of its content and of the options that it is processed with, or by
the name that the client gave it. The name, the kind and the place of each medium are in the hashes
of KV blocks, in the digest that proves a pull, and in the state from which a stream resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_engine.vllm.llm import decode_features, encode_features, multimodal_input

MAX_MEDIA_BYTES = 256 * 2**20
"""Maximum size of the tensors of one prompt's media that are sent to another engine."""

_FIRST_ID = 2**30


@dataclass(frozen=True, slots=True)
class Feature:
    """One medium of a rendered prompt, with the fields of vLLM's `MultiModalFeatureSpec`.

    Attributes:
        modality: `image`, `video`, `audio`, ...
        identifier: its name.
        mm_position: its place, with the fields `offset` and `length` in tokens.
        data: its processed tensors by name; None if only the engine has them.
    """

    modality: str
    identifier: str
    mm_position: Any
    data: Mapping[str, Any] | None


def has_media(prompt: Any) -> bool:
    """Return whether a prompt, as vLLM renders it, holds more than text."""
    return isinstance(prompt, dict) and bool(
        prompt.get("type") == "multimodal" or prompt.get("multi_modal_data")
    )


def features_of(prompt: Any) -> list[Feature]:
    """Return the processed media of a rendered prompt, in the order of their places."""
    if not isinstance(prompt, dict) or prompt.get("type") != "multimodal":
        return []
    features = [
        Feature(modality, name, place, item)
        for modality, names in prompt["mm_hashes"].items()
        for item, name, place in zip(
            *(prompt["mm_kwargs"][modality], names, prompt["mm_placeholders"][modality]),
            strict=True,
        )
    ]
    return sorted(features, key=lambda feature: feature.mm_position.offset)


def why_not_sent(prompt: Any) -> str | None:
    """Return why the media of a prompt cannot be sent to another engine; None if they can."""
    size = 0
    for feature in features_of(prompt):
        item = feature.data
        if item is None or "address" in item:
            return "the processed media are only in the memory of the engine that decodes"
        size += sum(leaf.nbytes for each in item.values() for leaf in _tensors(each.data))
    if size > MAX_MEDIA_BYTES:
        return f"the processed media have more than {MAX_MEDIA_BYTES // 2**20} MiB"
    return None


def encode_media(prompt: Any) -> bytes:
    """Return the processed media of a rendered prompt as bytes; empty without media."""
    features = features_of(prompt)
    return encode_features(features) if features else b""


def prompt_with_media(token_ids: Sequence[int], media: bytes) -> Any:
    """Return the engine's input for a prompt with the media that `encode_media` returned.

    Raises:
        ValueError: the bytes cannot be read, or a medium's place is not in the prompt.
    """
    try:
        features = decode_features(media)
    except Exception as error:
        raise ValueError(f"the media of a prompt cannot be read: {error}") from None
    end = 0
    for feature in features:
        place = feature.mm_position
        if place.offset < end or place.length < 1:
            raise ValueError("the media of a prompt overlap")
        end = place.offset + place.length
    if end > len(token_ids):
        raise ValueError(f"a medium ends at token {end} of a prompt of {len(token_ids)}")
    return multimodal_input(token_ids, features)


def media_digest(features: Iterable[Any], tokens: int | None = None) -> bytes:
    """Return 16 bytes that differ if kind, name or place of a medium differs; empty without media.

    Args:
        features: vLLM's `MultiModalFeatureSpec`s, in the order of their places.
        tokens: count only media that begin before this token.
    """
    found = [
        (each.modality, each.identifier, each.mm_position.offset, each.mm_position.length)
        for each in features
        if tokens is None or each.mm_position.offset < tokens
    ]
    if not found:
        return b""
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).digest()


def planning_tokens(prompt: Mapping[str, Any]) -> Sequence[int]:
    """Return a prompt's token ids with other ids at the places of its media.

    All images have the same placeholder tokens. A planner that looks for cached prefixes gets ids
    that no vocabulary has and that depend on the medium, so another image is another prefix.
    """
    token_ids = prompt.get("prompt_token_ids") or ()
    features = features_of(prompt)
    if not features:
        return token_ids
    changed = list(token_ids)
    for feature in features:
        named = f"{feature.modality} {feature.identifier}".encode()
        digest = hashlib.blake2b(named, digest_size=16).digest()
        ids = [
            _FIRST_ID + int.from_bytes(digest[at : at + 4], "little") % _FIRST_ID
            for at in range(0, 16, 4)
        ]
        start, length = feature.mm_position.offset, feature.mm_position.length
        changed[start : start + length] = (ids * (length // 4 + 1))[:length]
    return changed


def _tensors(nested: Any) -> Iterator[Any]:
    """Yield the tensors in a field of a medium, which may hold numbers and lists."""
    if isinstance(nested, (list, tuple)):
        for each in nested:
            yield from _tensors(each)
    elif hasattr(nested, "nbytes"):
        yield nested

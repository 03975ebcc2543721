"""A prompt's hashes are vLLM's, byte for byte, and its keys are those of vLLM's events."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from headrace_kvstore.identity.prompt_hash import hash_prompt, key_of, keys_of, root_hash
from tests.support.prompt_keys import DEFAULT_SEED, PromptKeys

EDGES = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1, 2**32 - 1]


def by_vllm(tokens: list[int], block: int, salt: str, lora: tuple[str, str] | None) -> list[bytes]:
    adapter = lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1])
    request: Any = SimpleNamespace(
        mm_features=[], lora_request=adapter, cache_salt=salt, prompt_embeds=None
    )
    parent, hashes = None, []
    for end in range(block, len(tokens) + 1, block):
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, end - block, end, 0)
        parent = hash_block_tokens(sha256_cbor, parent, tokens[end - block : end], extra)
        hashes.append(bytes(parent))
    return hashes


@pytest.mark.parametrize("block", [1, 16, 23, 24, 128, 300])
@pytest.mark.parametrize("salt", ["", "a", "tenant:é:" + "x" * 300])
@pytest.mark.parametrize("lora", [None, ("adapter", "/a/é")])
def test_hashes_are_vllms(
    block: int, salt: str, lora: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    kv_cache_utils.init_none_hash(sha256_cbor)
    rng = random.Random(block)
    tokens = EDGES + [rng.randrange(2 ** rng.randrange(1, 33)) for _ in range(700)]
    expected = by_vllm(tokens, block, salt, lora)
    hasher = PromptKeys(block)
    assert hasher.hashes(tokens, salt, lora) == expected
    assert hasher.hashes(np.array(tokens), salt, lora) == expected
    assert hasher.keys(tuple(tokens), salt, lora).tolist() == [
        kv_cache_utils.maybe_convert_block_hash(one) for one in expected
    ]


def test_the_seed_changes_all_hashes_as_it_does_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv_cache_utils.DEFAULT_NONE_HASH_SEED == DEFAULT_SEED
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    kv_cache_utils.init_none_hash(sha256_cbor)
    expected = by_vllm(EDGES, 5, "", None)
    monkeypatch.delenv("PYTHONHASHSEED")
    kv_cache_utils.init_none_hash(sha256_cbor)
    assert PromptKeys(5, "7").hashes(EDGES) == expected != PromptKeys(5).hashes(EDGES)


def test_a_part_of_a_block_has_no_hash() -> None:
    assert PromptKeys(16).hashes(range(15)) == []
    assert len(PromptKeys(16).hashes(range(33))) == 2
    assert PromptKeys(16).keys([]).shape == (0,)


@pytest.mark.parametrize("wrong", [[-1] * 16, [2**32] * 16, ["a"] * 16])
def test_what_is_no_token_id_is_refused(wrong: list) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        PromptKeys(16).hashes(wrong)


def test_ids_in_an_array_are_checked_too() -> None:
    with pytest.raises(ValueError, match="32 bits"):
        PromptKeys(16).hashes(np.full(16, -1))


def test_a_root_must_be_a_hash() -> None:
    with pytest.raises(ValueError, match="root hash"):
        hash_prompt(range(16), 16, b"short")
    assert len(root_hash("")) == 32


def test_both_forms_of_a_hash_have_one_key() -> None:
    whole = [bytes(range(i, i + 32)) for i in range(5)]
    numbers = [kv_cache_utils.maybe_convert_block_hash(one) for one in whole]
    short = [one[16:] for one in whole]
    odd = [one[5:] for one in whole]
    for form in (whole, numbers, short, odd, [*whole[:2], *numbers[2:]], [*numbers[:2], *odd[2:]]):
        assert keys_of(form).tolist() == numbers == [key_of(one) for one in form]
    assert keys_of([]).shape == (0,)
    assert keys_of([2**64 - 1]).tolist() == [2**64 - 1]

"""Which blocks may stand for each other: namespaces, their digests, and block keys."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from headrace_kvstore.keys import (
    KEY_BYTES,
    Namespace,
    block_key,
    namespace,
    padded_hash,
    split_key,
)

PLAIN: dict[str, Any] = dict(
    model="org/model",
    revision="0123456789abcdef",
    dtype="bfloat16",
    block_tokens=128,
    layout="LBHNC/CPU_ATTN",
    device="cpu/vec",
    engine="vllm 0.29.0",
    hash_algorithm="sha256_cbor",
    hash_seed="vllm-none-hash",
)


def test_the_digest_never_changes_by_itself() -> None:
    """Stored blocks are found by it: a change makes every cache cold."""
    assert namespace(**PLAIN).digest.hex() == "277c40325e393659528b83d859c32eee"


def test_any_field_makes_another_namespace() -> None:
    base = dataclasses.replace(namespace(**PLAIN), tp_size=4, pp_size=4, cp_size=4)
    digests = {base.digest}
    for field in dataclasses.fields(Namespace):
        value = getattr(base, field.name)
        other = value + 1 if isinstance(value, int) else value + "x"
        digests.add(dataclasses.replace(base, **{field.name: other}).digest)
    assert len(digests) == 1 + len(dataclasses.fields(Namespace))


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    one = namespace(**PLAIN | {"model": "a", "revision": "bc"})
    two = namespace(**PLAIN | {"model": "ab", "revision": "c"})
    quoted = namespace(**PLAIN | {"model": 'a","revision":"bc', "revision": ""})
    assert len({one.digest, two.digest, quoted.digest}) == 3


def test_spellings_of_one_meaning_are_one_namespace() -> None:
    base = namespace(**PLAIN)
    assert namespace(**PLAIN | {"dtype": "torch.bfloat16"}) == base
    assert namespace(**PLAIN, kv_cache_dtype="bfloat16") == base
    assert namespace(**PLAIN, overrides={}, quantization=None) == base
    swapped = [namespace(**PLAIN, overrides=o) for o in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert swapped[0] == swapped[1] != base
    assert namespace(**PLAIN, kv_cache_dtype="fp8_e4m3") != base


def test_it_survives_json() -> None:
    base = namespace(**PLAIN, tp=(1, 2), overrides={"rope": "für"})
    again = Namespace(**json.loads(json.dumps(base.as_dict())))
    assert again == base
    assert again.digest == base.digest


def test_the_hash_seed_is_told_apart_and_not_told() -> None:
    base = namespace(**PLAIN)
    other = namespace(**PLAIN | {"hash_seed": "s3cret"})
    assert base.digest != other.digest
    assert "s3cret" not in json.dumps(other.as_dict()) + other.describe()


def test_a_line_for_people() -> None:
    lossy = namespace(**PLAIN, tp=(1, 2), codec="int4", technique="int4 g64")
    line = lossy.describe()
    assert line.startswith(lossy.digest.hex()[:12])
    for part in ("org/model@0123456789ab", "tp 1/2", "128 tokens", "int4 v1", "lossy: int4 g64"):
        assert part in line
    assert "pp" not in line
    assert "lossy" not in namespace(**PLAIN).describe()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"model": ""}, ValueError),
        ({"layout": ""}, ValueError),
        ({"block_tokens": 0}, ValueError),
        ({"tp": (2, 2)}, ValueError),
        ({"pp": (-1, 1)}, ValueError),
        ({"block_tokens": "128"}, TypeError),
        ({"block_tokens": True}, TypeError),
        ({"codec_version": 1.0}, TypeError),
        ({"revision": 7}, TypeError),
        ({"overrides": {"a": object()}}, TypeError),
    ],
)
def test_what_no_engine_can_mean_is_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        namespace(**PLAIN | wrong)


def test_hashes_of_both_of_vllms_lengths_are_padded_to_32_bytes() -> None:
    full = bytes(range(1, 33))
    assert padded_hash(full) == full
    assert padded_hash(full[:16]) == full[:16] + bytes(16)
    assert padded_hash(memoryview(full)) == full


def test_an_int_hash_is_the_last_eight_bytes_as_in_kv_events() -> None:
    full = bytes(range(1, 33))
    short = int.from_bytes(full, "big") & ((1 << 64) - 1)
    assert padded_hash(short) == full[-8:] + bytes(24)


@pytest.mark.parametrize("wrong", [b"", bytes(32), b"\x01" * 33, b"\x01" * 36, -1, 1 << 64, 0])
def test_what_is_no_block_hash_is_refused(wrong: bytes | int) -> None:
    with pytest.raises(ValueError, match="block hash"):
        padded_hash(wrong)


@pytest.mark.parametrize("wrong", ["text", None, 1.5, True])
def test_a_hash_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        padded_hash(wrong)


def test_a_key_is_digest_and_hash() -> None:
    digest, block_hash = namespace(**PLAIN).digest, bytes(range(32))
    key = block_key(digest, block_hash)
    assert len(key) == KEY_BYTES
    assert split_key(key) == (digest, block_hash)
    with pytest.raises(ValueError, match="digest"):
        block_key(digest[:8], block_hash)
    with pytest.raises(ValueError, match="key"):
        split_key(key[:-1])

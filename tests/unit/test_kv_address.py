"""Which blocks may stand for each other: namespaces, their digests, and block keys."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from headrace_kvstore.identity.namespace import (
    KvIdentity,
    Namespace,
    block_key,
    canonical,
    fingerprint,
    owned_name,
)

PLAIN: dict[str, Any] = dict(
    model="org/model",
    revision="0123456789abcdef",
    settings="{}",
    max_model_len=4096,
    dtype="bfloat16",
    kv_cache_dtype="auto",
    engine="vllm 0.29.0",
    device="cpu/vec",
    layers=30,
    speculative="",
    parts=3,
    block_tokens=128,
    layout="LBHNC/CPU_ATTN",
    hash_algorithm="sha256_cbor",
    hash_root=fingerprint("vllm-none-hash"),
    codec="raw",
    codec_version=1,
    technique="",
)


def namespace(**changes: Any) -> Namespace:
    return Namespace(**PLAIN | changes)


def test_the_digest_never_changes_by_itself() -> None:
    """Stored blocks are found by it: a change makes every cache cold."""
    assert namespace().digest.hex() == "f0d0b5b6d0db5bda368b14609e23dde7"


def test_any_field_makes_another_namespace() -> None:
    base = namespace(parts=4)
    digests = {base.digest}
    for field in dataclasses.fields(Namespace):
        value = getattr(base, field.name)
        other = value + 1 if isinstance(value, int) else value + "x"
        digests.add(dataclasses.replace(base, **{field.name: other}).digest)
    assert len(digests) == 1 + len(dataclasses.fields(Namespace))


def test_any_field_makes_another_identity() -> None:
    names = [field.name for field in dataclasses.fields(KvIdentity)]
    base = KvIdentity(**{name: PLAIN[name] for name in names})
    made = {base.encoding}
    for name in names:
        value = getattr(base, name)
        other = value + 1 if isinstance(value, int) else value + "x"
        made.add(dataclasses.replace(base, **{name: other}).encoding)
    assert len(made) == 1 + len(names)


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    one = namespace(model="a", revision="bc")
    two = namespace(model="ab", revision="c")
    quoted = namespace(model='a","revision":"bc', revision="x")
    assert len({one.digest, two.digest, quoted.digest}) == 3


def test_spellings_of_one_meaning_are_one_namespace() -> None:
    base = namespace()
    assert namespace(dtype="torch.bfloat16") == base
    assert namespace(kv_cache_dtype="bfloat16") == base
    assert namespace(kv_cache_dtype="fp8_e4m3") != base
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})


def test_it_survives_json() -> None:
    base = namespace(parts=2, settings=canonical({"rope": "für"}))
    again = Namespace(**json.loads(json.dumps(dataclasses.asdict(base))))
    assert again == base
    assert again.digest == base.digest


def test_the_hash_seed_is_told_apart_and_not_told() -> None:
    base, other = namespace(), namespace(hash_root=fingerprint("s3cret"))
    assert base.digest != other.digest
    assert "s3cret" not in other.describe()


def test_a_line_for_people() -> None:
    lossy = namespace(parts=2, codec="int4", technique="int4 g64")
    line = lossy.describe()
    assert line.startswith(lossy.digest.hex()[:12])
    for part in ("org/model", '"parts":2', '"block_tokens":128', "int4 g64"):
        assert part in line
    assert "technique" not in namespace().describe()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"model": ""}, ValueError),
        ({"layout": ""}, ValueError),
        ({"block_tokens": 0}, ValueError),
        ({"parts": 0}, ValueError),
        ({"block_tokens": "128"}, TypeError),
        ({"block_tokens": True}, TypeError),
        ({"codec_version": 1.0}, TypeError),
        ({"revision": 7}, TypeError),
        ({"settings": None}, TypeError),
        ({"revision": ""}, ValueError),
        ({"max_model_len": 0}, ValueError),
    ],
)
def test_what_no_engine_can_mean_is_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        namespace(**wrong)


def test_an_owned_name_is_its_owners() -> None:
    names = {owned_name(hash, owner) for hash in (b"h", b"i") for owner in (b"a", b"b")}
    assert len(names) == 4 and {len(name) for name in names} == {32}


def test_a_key_is_digest_and_hash_padded_to_32_bytes() -> None:
    digest, full = namespace().digest, bytes(range(1, 33))
    assert block_key(digest, full) == digest + full
    assert block_key(digest, full[:16]) == digest + full[:16] + bytes(16)
    with pytest.raises(ValueError, match="digest"):
        block_key(digest[:8], full)


@pytest.mark.parametrize("wrong", [b"", bytes(32), b"\x01" * 33, b"\x01" * 36])
def test_what_is_no_block_hash_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="block hash"):
        block_key(b"d" * 16, wrong)

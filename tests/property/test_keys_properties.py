"""The keys that a decode replica tells of a prompt are those of its engine's own block hashes."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from headrace_decode.rendering.keys import BlockKeysRoute, RenderedPrompt
from headrace_engine.vllm.kv_cache import BlockHasher
from headrace_kvstore.identity.salts import tenant_salt

ALGORITHM = "sha256_cbor"
SALTS = st.text(max_size=30) | st.builds(
    tenant_salt, st.text(st.characters(exclude_characters=":"), min_size=1), st.text(max_size=9)
)


@given(
    token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100),
    salt=SALTS,
    block=st.sampled_from([1, 16, 24]),
)
def test_keys_are_the_engines(token_ids: list[int], salt: str, block: int) -> None:
    hash_function = get_hash_fn_by_name(ALGORITHM)
    kv_cache_utils.init_none_hash(hash_function)
    in_engine = Request(
        "r",
        token_ids,
        SamplingParams(max_tokens=1),
        None,
        cache_salt=salt or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(block, hash_function),
    )

    async def render(target: str, body: dict[str, Any]) -> RenderedPrompt:
        return RenderedPrompt(token_ids, salt, 1)

    async def nothing(scope: Any, receive: Any, send: Any) -> None: ...

    route = BlockKeysRoute(nothing, render, BlockHasher(ALGORITHM, block))
    told = asyncio.run(route.answer(json.dumps({"target": "/", "body": {}}).encode()))
    keys = np.frombuffer(base64.b64decode(told["keys"]), "<u8")
    assert keys.tolist() == [
        kv_cache_utils.maybe_convert_block_hash(one) for one in in_engine.block_hashes
    ]

"""Computes how much KV a model keeps, and would keep under other arrangements of its attention.

    bytes a token = layers with a cache * elements of one layer's K and V * bytes of an element

| row                    | layers with a cache | elements a token and layer                       |
|------------------------|---------------------|--------------------------------------------------|
| as it is               | the model's         | the model's                                      |
| mha, mqa               | all                 | 2 * D * heads, 2 * D                             |
| gqa                    | all                 | 2 * D * KV heads, 8 if the model groups none     |
| mla                    | all                 | the model's latent, or 4 D + D / 2 (DeepSeek-V2) |
| cla, yoco, lite, fused | half of them        | the model's                                      |
| fp8                    | the model's         | the model's, of 1 byte                           |
| int4                   | the model's         | as the KV store keeps a block, with its scales   |

A block is `block_tokens` tokens in all layers. A context takes whole blocks. Sources: MQA (arXiv
1911.02150), GQA (2305.13245), MLA (2405.04434, table 1), CLA (2405.12981), YOCO (2405.05254), Lite
and Fused (2512.03870).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.model.facts import ModelFacts
from headrace.model.registry import ModelError
from headrace_kvstore.codec import CODECS, LayerShape, Order


@dataclass(frozen=True, slots=True)
class KvSize:
    """One row of the table.

    Attributes:
        name: name of the arrangement.
        kv_layers: layers with a cache.
        bytes_per_token, bytes_per_block: bytes of K and V in all layers.
        blocks: blocks that the memory holds. contexts: whole contexts that these blocks hold at
            once.
        context_bytes: bytes of one context.
    """

    name: str
    kv_layers: int
    bytes_per_token: int
    bytes_per_block: int
    blocks: int
    contexts: int
    context_bytes: int


def kv_sizes(
    facts: ModelFacts, memory_bytes: int, context_tokens: int, block_tokens: int
) -> list[KvSize]:
    """Return the rows of the table, first the model as it is.

    Args:
        memory_bytes: memory for KV.
        context_tokens: tokens of one request.

    Raises:
        ModelError: a size is not positive.
    """
    for what, size in (
        ("memory for KV", memory_bytes),
        ("context", context_tokens),
        ("block", block_tokens),
    ):
        if size < 1:
            raise ModelError(f"the {what} is {size}: it must be above 0")
    kept, layers = facts.kv_layers, facts.layers
    own = facts.kv_planes * facts.kv_heads * facts.head_dim
    plain = 2 * facts.channels
    groups = facts.kv_planes == 2 and facts.kv_heads < facts.heads
    grouped = facts.kv_heads if groups else min(8, facts.heads)
    latent = own if facts.kv_planes == 1 else 4 * facts.channels + facts.channels // 2
    wide, half = facts.dtype_bytes, layers - layers // 2
    elements = {
        "as it is": (kept, own * wide),
        "mha": (layers, plain * facts.heads * wide),
        "gqa": (layers, plain * grouped * wide),
        "mqa": (layers, plain * wide),
        "mla": (layers, latent * wide),
        "cla": (half, own * wide),
        "yoco": (half, own * wide),
        "lite": (half, own * wide),
        "fused": (half, own * wide),
        "fp8": (kept, own),
    }
    rows = [(name, n, n * each * block_tokens) for name, (n, each) in elements.items()]
    if facts.kv_planes == 2:  # a codec must tell K and V apart
        rows.append(("int4", kept, kept * _int4_bytes(facts, block_tokens)))
    found = []
    for name, kv_layers, block_bytes in rows:
        blocks, needed = memory_bytes // block_bytes, -(-context_tokens // block_tokens)
        found.append(
            KvSize(
                name,
                kv_layers,
                block_bytes // block_tokens,
                block_bytes,
                blocks,
                blocks // needed,
                needed * block_bytes,
            )
        )
    return found


def _int4_bytes(facts: ModelFacts, block_tokens: int) -> int:
    """Return the int4 bytes of one layer of one block."""
    shape = LayerShape(facts.kv_heads, block_tokens, facts.head_dim, "bfloat16", Order.VEC)
    try:
        return CODECS["int4"]().stored_bytes(shape)
    except ValueError as error:
        raise ModelError(f"int4: {error}") from None

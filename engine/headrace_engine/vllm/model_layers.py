"""The layers of which vLLM's models are built, for model classes outside of vLLM.

`tests/unit/test_contracts_cross_layer.py` pins what is used here.
"""

from __future__ import annotations

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backends.utils import KVSharingFastPrefillMetadata

__all__ = [
    "Attention",
    "AutoWeightsLoader",
    "ColumnParallelLinear",
    "IntermediateTensors",
    "LlamaMLP",
    "LogitsProcessor",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "RowParallelLinear",
    "VllmConfig",
    "VocabParallelEmbedding",
    "WeightsMapper",
    "get_rope",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "maybe_prefix",
]


def rows_with_logits(layer_name: str) -> Tensor | None:
    """Return the rows of this step's batch whose logits are needed, int64 [r].

    Return None if all rows must run: the engine was not started with `kv_sharing_fast_prefill`, the
    layer has a KV cache of its own, or this is a dummy run, such as one that records a CUDA graph.
    """
    by_layer = get_forward_context().attn_metadata
    if not isinstance(by_layer, dict):
        return None
    metadata = by_layer.get(layer_name)
    if not isinstance(metadata, KVSharingFastPrefillMetadata):
        return None
    rows = metadata.logits_indices_padded
    return None if rows is None else rows[: metadata.num_logits_indices].long()

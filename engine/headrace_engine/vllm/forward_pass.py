"""The parts of a Llama-shaped model of vLLM, to compute rows of prompts outside of vLLM's steps.

`tests/unit/test_contracts_blending.py` pins what is used here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

from headrace_engine.kv_views import KvOrder
from headrace_engine.vllm.attention.layers import (
    unsupported_kv_cache,
    unsupported_layers,
    unsupported_model,
)

DECODERS = frozenset({"LlamaModel", "Qwen2Model", "Qwen3Model"})
"""Model classes of vLLM whose forward pass is: embedding, each layer as
`layer(positions, hidden, residual)`, norm. Read a class before adding it: others with the same
signature scale their embeddings."""


class Unsupported(ValueError):
    """The engine cannot compute rows outside of its steps; the text says why."""


@dataclass(frozen=True)
class Decoder:
    """The parts of a model with which rows are computed.

    Attributes:
        embed: token ids [n] -> hidden [n, width].
        layers: in order; each `layer(positions, hidden, residual) -> hidden, residual`.
        attention: each layer's attention module of vLLM.
        norm: (hidden, residual) -> (hidden, _), after the last layer.
        logits: the output of `norm` -> [n, vocabulary].
    """

    embed: Any
    layers: list[nn.Module]
    attention: list[Any]
    norm: Any
    logits: Any


def find_decoder(model: nn.Module) -> Decoder:
    """Return the parts of a model.

    Raises:
        Unsupported: it is not a Llama-shaped decoder.
    """
    inner = getattr(model, "model", None)
    if type(inner).__name__ not in DECODERS:
        raise Unsupported(
            f"rows of {type(model).__name__} ({type(inner).__name__}) cannot be recomputed: known "
            f"are {', '.join(sorted(DECODERS))}"
        )
    assert inner is not None
    layers = list(inner.layers)
    for layer in layers:
        taken = list(inspect.signature(layer.forward).parameters)
        if taken[:3] != ["positions", "hidden_states", "residual"]:
            raise Unsupported(f"{type(layer).__name__}.forward takes {taken}")
    attention = [layer.self_attn.attn for layer in layers]
    for module in attention:
        if not isinstance(module, Attention):
            raise Unsupported(f"{type(module).__name__} is no causal attention of vLLM's")
    if (why := unsupported_layers(attention)) is not None:
        raise Unsupported(why)
    return Decoder(inner.embed_input_ids, layers, attention, inner.norm, model.compute_logits)


def check_engine(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `Unsupported` for an engine in which rows outside of its steps would differ from the
    model's own."""
    why = unsupported_model(config, heads_divided=True)
    if config.parallel_config.data_parallel_size > 1:
        why = "data_parallel_size is above 1"
    elif config.lora_config is not None:
        why = "the engine has LoRA adapters"
    if (why := why or unsupported_kv_cache(kv_cache_config)) is not None:
        raise Unsupported(why)


def kv_caches(
    decoder: Decoder, kv_cache_config: KVCacheConfig
) -> tuple[list[Tensor], KvOrder, int]:
    """Return the engine's KV cache in the model's order of layers.

    Returns:
        Each layer's cache; the order of K and V in their last two axes; and tokens of the
        scheduler's block.

    Raises:
        Unsupported: its layout is not known.
    """
    [group] = kv_cache_config.kv_cache_groups
    caches = [module.kv_cache for module in decoder.attention]
    order = KvOrder.JOINED
    if caches[0].device.type == "cpu":
        isa = getattr(decoder.attention[0], "isa", None)
        if isa != "vec":
            raise Unsupported(f"the CPU's KV layout {isa} is not known: known is vec")
        order = KvOrder.VEC
    if caches[0].shape[3] != 2 * decoder.attention[0].head_size:
        raise Unsupported(f"a KV cache of shape {tuple(caches[0].shape)} is not known")
    return caches, order, group.kv_cache_spec.block_size


class ForwardContexts:
    """Factory of vLLM's forward contexts, which say what each row attends to.

    Args:
        config, kv_cache_config: of the engine.
        decoder: its model.
        kernel_tokens: tokens in a block of the attention kernel.
    """

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        decoder: Decoder,
        kernel_tokens: int,
    ) -> None:
        [group] = kv_cache_config.kv_cache_groups
        self._config, self._names = config, [m.layer_name for m in decoder.attention]
        device = decoder.attention[0].kv_cache.device
        backend = decoder.attention[0].get_attn_backend()
        spec = replace(group.kv_cache_spec, block_size=kernel_tokens)
        # Use a separate builder: the engine's may keep buffers of its current step.
        self._builder = backend.get_builder_cls()(spec, self._names, config, device)
        self._device = device

    def metadata(
        self,
        queries: NDArray[np.int64],
        lengths: NDArray[np.int64],
        tables: NDArray[np.int64],
        slots: Tensor,
    ) -> Any:
        """Return vLLM's attention metadata of some pseudo-requests.

        Args:
            queries: int64 [r], number of rows of each.
            lengths: int64 [r], KV length of each: its last row's position + 1.
            tables: int64 [r, maximum blocks], block tables in the kernel's numbering.
            slots: int64 [rows].
        """
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(queries)]).astype(np.int32))
        seq_lens = torch.from_numpy(lengths.astype(np.int32))
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(self._device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(queries),
            num_actual_tokens=int(queries.sum()),
            max_query_len=int(queries.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=torch.from_numpy(tables.astype(np.int32)).to(self._device),
            slot_mapping=slots,
        )
        # fast_build makes no schedule ahead of time: its buffer fits the engine's requests only.
        return self._builder.build(0, common, fast_build=True)

    @contextmanager
    def layer(self, number: int, metadata: Any, slots: Tensor) -> Iterator[None]:
        """Enter the forward context in which one layer computes these rows."""
        name = self._names[number]
        with set_forward_context(
            {name: metadata},
            self._config,
            num_tokens=len(slots),
            slot_mapping={name: slots},
            skip_compiled=True,
        ):
            yield

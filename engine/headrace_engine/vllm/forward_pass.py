"""The parts of a decoder of vLLM, to compute rows of prompts outside of vLLM's steps.

`tests/unit/test_contracts_blending.py` pins what is used here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

from headrace_engine.kv_views import KvOrder
from headrace_engine.vllm.attention.layers import (
    unsupported_kv_cache,
    unsupported_layers,
    unsupported_model,
)


class Unsupported(ValueError):
    """The engine cannot compute rows outside of its steps; the text says why."""


@dataclass(frozen=True)
class Decoder:
    """The parts of a model with which rows are computed.

    Attributes:
        name: of the model's classes, for people.
        embed: token ids [n] -> hidden [n, width].
        layers: in order; each `layer(positions, hidden, residual) -> hidden, residual`.
        attention: each layer's attention module of vLLM.
        norm: (hidden, residual) -> (hidden, _), after the last layer.
        forward: (token ids, positions) -> the output of `norm`, by the model's own forward pass.
        logits: the output of `norm` -> [n, vocabulary].
    """

    name: str
    embed: Any
    layers: list[nn.Module]
    attention: list[Any]
    norm: Any
    forward: Callable[[Tensor, Tensor], Tensor]
    logits: Any


def find_decoder(model: nn.Module) -> Decoder:
    """Return the parts of a model. They need not add up to its forward pass: some models do more
    between them, such as scaling embeddings.

    Raises:
        Unsupported: it has other parts.
    """
    inner: Any = getattr(model, "model", None)
    name = f"{type(model).__name__} ({type(inner).__name__})"
    missing = [part for part in ("embed_input_ids", "layers", "norm") if not hasattr(inner, part)]
    if missing:
        raise Unsupported(f"rows of {name} cannot be recomputed: it has no {missing[0]}")
    layers: list[nn.Module] = list(inner.layers)
    attention = [_attention(layer) for layer in layers]
    if (why := unsupported_layers(attention)) is not None:
        raise Unsupported(why)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        output = model(ids, positions, intermediate_tensors=None, inputs_embeds=None)
        # Engines with some drafters get hidden states of layers in addition.
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    parts = inner.embed_input_ids, layers, attention, inner.norm
    return Decoder(name, *parts, forward, model.compute_logits)


def _attention(layer: nn.Module) -> Any:
    """Return a layer's attention module.

    Raises:
        Unsupported: the layer is called in another way, or has none or several.
    """
    kind, taken = type(layer).__name__, list(inspect.signature(layer.forward).parameters)
    if taken[:3] != ["positions", "hidden_states", "residual"]:
        raise Unsupported(f"{kind}.forward takes {taken}")
    found = [module for module in layer.modules() if isinstance(module, AttentionLayerBase)]
    if len(found) != 1:
        raise Unsupported(f"{kind} has {len(found)} attention modules")
    if not isinstance(found[0], Attention):
        raise Unsupported(f"{type(found[0]).__name__} is no causal attention of vLLM's")
    return found[0]


def check_engine(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `Unsupported` for an engine in which rows outside of its steps would differ from the
    model's own."""
    why = unsupported_model(config, heads_divided=True)
    if config.parallel_config.data_parallel_size > 1:
        why = "data_parallel_size is above 1"
    elif config.lora_config is not None:
        why = "the engine has LoRA adapters"
    elif config.parallel_config.enable_eplb:
        why = "experts are moved by the load of the engine's steps (enable_eplb)"
    elif config.aux_output_config.enabled:
        why = "the engine returns the experts of its steps (enable_return_routed_experts)"
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

    def layer(self, number: int, metadata: Any, slots: Tensor) -> AbstractContextManager[None]:
        """Return the forward context in which one layer computes these rows."""
        return self._context(self._names[number : number + 1], metadata, slots)

    def all_layers(self, metadata: Any, slots: Tensor) -> AbstractContextManager[None]:
        """Return the forward context in which the whole model computes these rows."""
        return self._context(self._names, metadata, slots)

    def _context(
        self, names: Sequence[str], metadata: Any, slots: Tensor
    ) -> AbstractContextManager[None]:
        return set_forward_context(
            dict.fromkeys(names, metadata),
            self._config,
            num_tokens=len(slots),
            slot_mapping=dict.fromkeys(names, slots),
            skip_compiled=True,
        )

"""The recompute pass's uses of vLLM beyond its documented API; an upgrade breaks this file first.

`tests/unit/test_contracts_reuse.py` checks each of these uses.
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
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from headrace_prefill.blending.engine.paged import Order, PagedKV

DECODERS = frozenset({"LlamaModel", "Qwen2Model", "Qwen3Model"})
"""Model classes of vLLM whose forward pass is: embedding, each layer as
`layer(positions, hidden, residual)`, norm. Read a class before adding it: others with the same
signature scale their embeddings."""


class Unsupported(ValueError):
    """This engine cannot recompute rows; the text says why."""


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


def decoder(model: nn.Module) -> Decoder:
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
        if not isinstance(module, Attention) or module.attn_type != AttentionType.DECODER:
            raise Unsupported(f"{type(module).__name__} is no causal attention of vLLM's")
        if module.sliding_window is not None or module.has_sink:
            raise Unsupported(f"{module.layer_name} has a sliding window or a sink")
        if module.kv_sharing_target_layer_name is not None:
            raise Unsupported(f"{module.layer_name} shares another layer's KV")
        if module.head_size != module.head_size_v or module.kv_cache_dtype.startswith(
            ("fp8", "nvfp4", "int8")
        ):
            raise Unsupported(
                f"{module.layer_name} keeps KV as {module.kv_cache_dtype}, K of {module.head_size} "
                f"and V of {module.head_size_v} channels: known are equal ones, not quantised"
            )
    return Decoder(inner.embed_input_ids, layers, attention, inner.norm, model.compute_logits)


def check_engine(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `Unsupported` for an engine in which a side pass would not compute the model's rows."""
    parallel = config.parallel_config
    for kind in (
        *("pipeline_parallel", "tensor_parallel", "data_parallel"),
        *("prefill_context_parallel", "decode_context_parallel"),
    ):
        if getattr(parallel, f"{kind}_size", 1) > 1:
            raise Unsupported(f"{kind}_size is above 1")
    if config.lora_config is not None:
        raise Unsupported("the engine has LoRA adapters")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        raise Unsupported(f"KV cache groups {[type(spec).__name__ for spec in specs]}")


def paged_kv(opened: Decoder, kv_cache_config: KVCacheConfig) -> PagedKV:
    """Return the engine's KV cache in the model's order of layers.

    Raises:
        Unsupported: its layout is not known.
    """
    [group] = kv_cache_config.kv_cache_groups
    caches = [module.kv_cache for module in opened.attention]
    order = Order.JOINED
    if caches[0].device.type == "cpu":
        isa = getattr(opened.attention[0], "isa", None)
        if isa != "vec":
            raise Unsupported(f"the CPU's KV layout {isa} is not known: known is vec")
        order = Order.VEC
    if caches[0].shape[3] != 2 * opened.attention[0].head_size:
        raise Unsupported(f"a KV cache of shape {tuple(caches[0].shape)} is not known")
    return PagedKV(caches, order, group.kv_cache_spec.block_size)


class Contexts:
    """A maker of vLLM forward contexts, which say what each row attends to.

    Args:
        config, kv_cache_config: of the engine.
        opened: its model.
        kernel_tokens: tokens in a block of the attention kernel.
    """

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        opened: Decoder,
        kernel_tokens: int,
    ) -> None:
        [group] = kv_cache_config.kv_cache_groups
        self._config, self._names = config, [m.layer_name for m in opened.attention]
        device = opened.attention[0].kv_cache.device
        backend = opened.attention[0].get_attn_backend()
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

"""Llama- and Qwen3-shaped models with `kv_fusion`, for vLLM.

They are built from vLLM's own layers. They differ from its Llama and Qwen3 in these points only:

- A layer without KV has no K and V projection and attends to storage layers' caches.
- If the engine runs with `kv_sharing_fast_prefill`, only the rows whose logits are needed run in
  the layers after the last storage layer. Later tokens read nothing that depends on the other rows
  there. vLLM lists the needed rows in such a layer's attention metadata: the last row of each
  request, and the draft tokens. It refuses prompt log-probabilities in such an engine. Without the
  option all rows run, and prompt log-probabilities are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headrace_engine.vllm.model_layers import (
    Attention,
    AutoWeightsLoader,
    ColumnParallelLinear,
    IntermediateTensors,
    LlamaMLP,
    LogitsProcessor,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VllmConfig,
    VocabParallelEmbedding,
    WeightsMapper,
    get_rope,
    get_tensor_model_parallel_world_size,
    maybe_prefix,
    rows_with_logits,
)
from headrace_engine.vllm.platforms import runs_on_cpu, runs_on_cuda_or_rocm
from headrace_prefill.cross_layer.config import CrossLayerConfigError
from headrace_prefill.cross_layer.engine.blocks import Mixer
from headrace_prefill.cross_layer.engine.mixture import Mixture
from headrace_prefill.cross_layer.shape import DecoderShape


class CrossLayerAttention(nn.Module):
    """Attention of one layer.

    Args:
        below: vLLM's attention modules of the layers below.
        memory: the `Mixer` or `Scratch` for mixed blocks.
    """

    def __init__(
        self,
        config: VllmConfig,
        shape: DecoderShape,
        layer: int,
        below: list[Attention],
        memory: Any,
        prefix: str,
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.dim, self.heads = shape.head_dim, shape.heads // ranks
        self.kv_heads = max(1, shape.kv_heads // ranks)
        self.stores = shape.cross_layer.stores(layer)
        quantised = config.quant_config
        if self.stores:
            self.qkv_proj = QKVParallelLinear(
                shape.hidden,
                self.dim,
                shape.heads,
                shape.kv_heads,
                bias=shape.attention_bias,
                quant_config=quantised,
                prefix=f"{prefix}.qkv_proj",
            )
        else:
            self.query_proj = ColumnParallelLinear(
                shape.hidden,
                shape.heads * self.dim,
                bias=shape.attention_bias,
                quant_config=quantised,
                prefix=f"{prefix}.query_proj",
            )
        self.o_proj = RowParallelLinear(
            shape.heads * self.dim,
            shape.hidden,
            bias=shape.attention_bias,
            quant_config=quantised,
            prefix=f"{prefix}.o_proj",
        )
        hf = config.model_config.hf_config
        self.rotary_emb = get_rope(
            self.dim,
            max_position=hf.max_position_embeddings,
            rope_parameters=hf.rope_parameters,
        )
        self.qk_norm = shape.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(self.dim, eps=shape.eps)
            if self.stores:
                self.k_norm = RMSNorm(self.dim, eps=shape.eps)
        if not self.stores and shape.cross_layer.mixes:
            self.mix = Mixture(self.kv_heads, self.dim)
        self.attn = Attention(
            self.heads,
            self.dim,
            self.dim**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=config.cache_config,
            quant_config=quantised,
            prefix=f"{prefix}.attn",
            **self._sources(shape, layer, below, memory),
        )

    def _sources(
        self, shape: DecoderShape, layer: int, below: list[Attention], memory: Any
    ) -> dict[str, Any]:
        """Return the arguments with which vLLM's attention reads other layers' caches."""
        if self.stores:
            return {}
        keys = [below[source] for source in shape.cross_layer.keys(layer)]
        values = [below[source] for source in shape.cross_layer.values(layer)]
        shared: dict[str, Any] = {"kv_sharing_target_layer_name": keys[-1].layer_name}
        if keys == values and len(keys) == 1:
            return shared
        lite, fused = backends(shape.cross_layer.kind)
        rounded = keys[0].kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32")
        if rounded and not (runs_on_cpu() and len(keys) == 1):
            raise CrossLayerConfigError(
                f"kv_fusion.kind {shape.cross_layer.kind} cannot read KV kept as "
                f"{keys[0].kv_cache_dtype} here"
            )
        if len(keys) == 1:
            return {**shared, "attn_backend": lite, "keys": keys[0], "values": values[0]}
        sources = {"first": keys[0], "last": keys[1], "mixture": self.mix, "memory": memory}
        return {**shared, "attn_backend": fused, **sources}

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        if self.stores:
            qkv, _ = self.qkv_proj(hidden)
            width = self.kv_heads * self.dim
            query, key, value = qkv.split([self.heads * self.dim, width, width], -1)
            if self.qk_norm:
                query, key = self._norm(self.q_norm, query), self._norm(self.k_norm, key)
            query, key = self.rotary_emb(positions, query, key)
            mixed = self.attn(query, key, value)
        else:
            query, _ = self.query_proj(hidden)
            if self.qk_norm:
                query = self._norm(self.q_norm, query)
            query, _ = self.rotary_emb(positions, query)
            mixed = self.attn(query, None, None)
        output, _ = self.o_proj(mixed)
        return output

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return norm(x.unflatten(-1, (-1, self.dim))).flatten(-2)


def backends(kind: str) -> tuple[type[Any], type[Any]]:
    """Return the attention backends of `lite` and of `fused` layers on this engine's device.

    Raises:
        CrossLayerConfigError: there is none.
    """
    if runs_on_cpu():
        from headrace_prefill.cross_layer.engine.attention import FusedBackend, LiteBackend

        return LiteBackend, FusedBackend
    if runs_on_cuda_or_rocm():
        from headrace_prefill.cross_layer.engine.device import attention

        return attention.LiteBackend, attention.FusedBackend
    raise CrossLayerConfigError(
        f"kv_fusion.kind {kind} has attention for CPUs and for GPUs of CUDA and ROCm: serve cla or "
        "yoco here"
    )


def mixing_memory(config: VllmConfig, shape: DecoderShape) -> Any:
    """Return the `Mixer` or `Scratch` that the mixing layers of an engine share."""
    if runs_on_cpu() or not runs_on_cuda_or_rocm():
        return Mixer()
    from headrace_prefill.cross_layer.engine.device.scratch import Scratch, usable_bytes

    cache = config.cache_config
    has_size = cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None
    usable = None if has_size else usable_bytes(cache.gpu_memory_utilization)
    return Scratch(shape.cross_layer.storage_layers, usable)


class CrossLayerDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm that adds the residual."""

    def __init__(
        self,
        config: VllmConfig,
        shape: DecoderShape,
        layer: int,
        below: list[Attention],
        memory: Any,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = CrossLayerAttention(
            config, shape, layer, below, memory, f"{prefix}.self_attn"
        )
        self.mlp = LlamaMLP(
            shape.hidden,
            shape.intermediate,
            config.model_config.hf_config.hidden_act,
            quant_config=config.quant_config,
            bias=shape.mlp_bias,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(shape.hidden, eps=shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, eps=shape.eps)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class CrossLayerModel(nn.Module):
    """The model without its output head."""

    def __init__(self, config: VllmConfig, shape: DecoderShape, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            shape.vocabulary, shape.hidden, quant_config=config.quant_config
        )
        self.layers, memory = nn.ModuleList(), mixing_memory(config, shape)
        for layer in range(shape.cross_layer.layers):
            below = [lower.self_attn.attn for lower in self.layers]
            named = f"{prefix}.layers.{layer}"
            self.layers.append(CrossLayerDecoderLayer(config, shape, layer, below, memory, named))
        self.norm = RMSNorm(shape.hidden, eps=shape.eps)
        self._cut = shape.cross_layer.first_after_storage

    def forward(self, tokens: Tensor | None, positions: Tensor, embeds: Tensor | None) -> Tensor:
        """Return the output of the last norm, [rows, hidden]; zero for rows that were left out."""
        hidden = self.embed_tokens(tokens) if embeds is None else embeds
        residual: Tensor | None = None
        for layer in self.layers[: self._cut]:
            hidden, residual = layer(positions, hidden, residual)
        total, rows = len(hidden), rows_with_logits(self.layers[-1].self_attn.attn.layer_name)
        if rows is not None and len(rows) == total:
            rows = None
        if rows is not None:
            positions, hidden, residual = positions[rows], hidden[rows], residual[rows]  # type: ignore[index]
        for layer in self.layers[self._cut :]:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        if rows is None:
            return hidden
        return hidden.new_zeros(total, hidden.shape[1]).index_copy_(0, rows, hidden)


class CrossLayerForCausalLM(nn.Module):
    """The model class that vLLM loads.

    Raises:
        CrossLayerConfigError: `kv_fusion` in config.json is not valid, or this engine has no
            attention for its kind.
    """

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        hf = vllm_config.model_config.hf_config
        self.shape = DecoderShape.of(hf.to_dict())
        self.model = CrossLayerModel(vllm_config, self.shape, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            self.shape.vocabulary,
            self.shape.hidden,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if self.shape.tied:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(self.shape.vocabulary)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        cross_layer = self.shape.cross_layer
        readers = [str(n) for n in range(cross_layer.layers) if not cross_layer.stores(n)]
        query = re.compile(rf"(layers\.(?:{'|'.join(readers)})\.self_attn)\.q_proj\.")
        mapper = WeightsMapper(
            orig_to_new_regex={query: r"\1.query_proj."} if readers else {},
            orig_to_new_stacked={
                ".q_proj": (".qkv_proj", "q"),
                ".k_proj": (".qkv_proj", "k"),
                ".v_proj": (".qkv_proj", "v"),
                ".gate_proj": (".gate_up_proj", 0),
                ".up_proj": (".gate_up_proj", 1),
            },
        )
        return AutoWeightsLoader(self).load_weights(weights, mapper=mapper)

"""Facts in a model folder's headers that give the size and the cost of KV. Reads no weights."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headrace.model.registry import ModelError
from headrace_prefill.cross_layer.config import CrossLayerConfig, CrossLayerConfigError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A decoder-only Transformer, as its config.json describes it.

    `kv_layers` have a KV cache; others (`kv_fusion` in config.json) read theirs.

    `dtype_bytes` is of one KV element in the engine: vLLM serves float32 checkpoints in 16 bits,
    so it is never above 2. `channels` are those of one attention head. `kv_heads` and `head_dim`
    are 1 and the latent's width where K and V are one latent (MLA). `params` is None unless the
    weights are safetensors. `max_model_len` is what vLLM takes as its default: `max_positions`
    times the factor of a scaled RoPE.
    """

    architecture: str
    layers: int
    kv_layers: int
    heads: int
    channels: int
    kv_heads: int
    head_dim: int
    kv_planes: int
    dtype: str
    dtype_bytes: int
    max_positions: int
    max_model_len: int
    params: int | None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token leaves in all layers, before tensor parallelism."""
        return self.kv_planes * self.kv_layers * self.kv_heads * self.head_dim * self.dtype_bytes


def describe(path: str | Path) -> ModelFacts:
    """Return the facts of a local Hugging Face folder; ModelError if config.json lacks them."""
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json: name a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{folder}/config.json holds no JSON object")
    return facts_from_config(config, params=count_params(folder))


def facts_from_config(config: Mapping[str, Any], params: int | None = None) -> ModelFacts:
    """Return the facts in a parsed config.json. Of a multimodal model, the text part holds KV."""
    text: Mapping[str, Any] = config
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            text = config[key]
            break
    layers = _whole(text, "num_hidden_layers", "n_layer", "n_layers")
    positions = _whole(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    try:
        kv_layers = CrossLayerConfig.of({**text, "num_hidden_layers": layers}).storage_layers
    except CrossLayerConfigError as error:
        raise ModelError(f"config.json: {error}") from None
    heads = _whole(text, "num_attention_heads", "n_head", "n_heads")
    if text.get("kv_lora_rank"):  # MLA: one latent and the rotary part of K, shared by all heads
        planes, kv_heads = 1, 1
        head_dim = _whole(text, "kv_lora_rank") + _whole(text, "qk_rope_head_dim")
        channels = int(text.get("v_head_dim") or 128)
    else:
        planes, kv_heads = 2, int(text.get("num_key_value_heads") or heads)
        head_dim = int(text.get("head_dim") or _whole(text, "hidden_size", "n_embd") // heads)
        channels = head_dim
    dtype = str(
        text.get("dtype") or text.get("torch_dtype")
        or config.get("dtype") or config.get("torch_dtype") or "float32"
    )  # fmt: skip
    return ModelFacts(
        architecture=(config.get("architectures") or ["unknown"])[0],
        layers=layers,
        kv_layers=kv_layers,
        heads=heads,
        channels=channels,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_planes=planes,
        dtype=dtype,
        dtype_bytes=min(2, _DTYPE_BYTES.get(dtype.removeprefix("torch."), 2)),
        max_positions=positions,
        max_model_len=_default_model_len(text, positions),
        params=params,
    )


def count_params(folder: Path) -> int | None:
    """Count the parameters in a folder's safetensors files by their headers; None without any."""
    total = 0
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with file.open("rb") as stream:
                (header_bytes,) = struct.unpack("<Q", stream.read(8))
                if header_bytes > 100_000_000:  # the format's own limit
                    return None
                header = json.loads(stream.read(header_bytes))
            total += sum(prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return None
    return total if files else None


def _whole(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"config.json does not give {names[0]}: not a decoder-only Transformer?")


def _default_model_len(text: Mapping[str, Any], positions: int) -> int:
    """Return the length that vLLM derives from the RoPE settings. Some kinds of RoPE include their
    factor in `positions` already."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
    if kind in {None, "default", "su", "longrope", "llama3", "mrope"}:
        return positions
    if kind == "yarn":
        positions = int(rope.get("original_max_position_embeddings") or positions)
    return int(positions * float(rope.get("factor") or 1.0))

"""Reading of decoders' model folders, and writing of folders that vLLM serves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace_lab.models.decoder import Decoder
from headrace_prefill.cross_layer.config import CrossLayerConfigError

WEIGHTS = "model.safetensors"
TYPES = ("llama", "qwen3")
"""Model types that can also be served with `kv_fusion`."""


def read(folder: Path, types: Sequence[str] = TYPES) -> tuple[dict[str, Any], Decoder]:
    """Read a parsed config.json, and the decoder in float32.

    Args:
        types: model types that are accepted.

    Raises:
        CrossLayerConfigError: the model is of another type, or its weights do not match
            config.json.
    """
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") not in types:
        known = ", ".join(types)
        raise CrossLayerConfigError(
            f"model_type is {config.get('model_type')!r}, must be one of {known}"
        )
    with torch.device("meta"):  # only the weights of the files take memory
        model = Decoder(config)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {name: weight.float() for name, weight in load_file(file).items()}
    weights = {name: one for name, one in weights.items() if "rotary_emb" not in name}
    missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    if model.shape.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unknown:
        raise CrossLayerConfigError(
            f"the weights do not fit config.json: {[*missing, *unknown][0]}"
        )
    return config, model.eval()


def write(
    folder: Path, config: Mapping[str, Any], model: Decoder, source: Path | None = None
) -> None:
    """Write config.json and the weights, in the dtype that config.json names.

    Args:
        folder: made if it does not exist.
        source: the folder of the model that this one was converted from; its tokenizer is copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir() if source is not None else ():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(file, folder / file.name)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    weights = {name: one.to(dtype).contiguous() for name, one in model.state_dict().items()}
    if model.shape.tied:
        del weights["lm_head.weight"]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})

"""Seconds to the first token of a long prompt, computed and loaded from the store.

The layers have real size: those of Gemma 3 4B, one of six with full attention, with random weights.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.families.cases import FIRST_TOKEN, LAST_TOKEN
from benchmarks.families.trial import Machine
from tests.support.connectors import store_connector

TOKENS, HITS = 6000, 3
BLOCK = 128
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 512,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
TARGET = 0.05


def measure(folder: Path) -> dict[str, Any]:
    """Return the seconds of a cold prompt and of hits, and their ratio.

    Raises:
        RuntimeError: the engine failed, or a hit was none.
    """
    model = folder / "gemma3-4b-layers"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    machine = Machine(folder, "decode")
    try:
        options = {"load_format": "dummy", "max_model_len": 8192, "block_size": BLOCK}
        machine.child.do(
            "open",
            model=str(model),
            dtype="bfloat16",
            options=options,
            transfer=store_connector(machine.store | {"node": False}),
        )
        draw = random.Random(1)
        prompt = [draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(TOKENS)]
        ask = {"salt": "a", "max_tokens": 1}
        machine.child.do("ask", prompts=[prompt[::-1][:BLOCK]], **ask)
        cold = machine.child.do("ask", prompts=[prompt], **ask)
        hits = []
        for _ in range(HITS):
            machine.child.do("forget")
            hits.append(machine.child.do("ask", prompts=[prompt], **ask))
    finally:
        machine.end()
    if cold["external"] or any(hit["external"] != TOKENS // BLOCK * BLOCK for hit in hits):
        raise RuntimeError(f"hits of {[hit['external'] for hit in hits]} tokens")
    cold_s, hit_s = cold["seconds"], statistics.median(hit["seconds"] for hit in hits)
    return {
        "tokens": TOKENS,
        "layers": CONFIG["num_hidden_layers"],
        "width": CONFIG["hidden_size"],
        "cold_s": round(cold_s, 3),
        "hit_s": round(hit_s, 3),
        "ratio": round(hit_s / cold_s, 4),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }

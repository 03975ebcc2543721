"""Engines of models that a technique cannot be done for, one after another, with all switched on.

    told("unsupported_models", FOLDER)

For each model: why not, what a prompt took from the prefix cache when it came again, blocks in the
store, and what the log said of it. Weights are random.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Gemma3TextConfig, GraniteConfig, LlamaConfig

from headrace_engine.kv_transfer.handoff import BLENDING_KEY
from tests.support.connectors import beside, blending_connector, store_connector
from tests.support.program import say

BLOCK, BLOCKS, TOKENS = 128, 40, 300
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
LLAMA = "LlamaForCausalLM"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 256,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
MODELS: dict[str, Callable[[], Any]] = {
    "yarn": lambda: LlamaConfig(**SIZES, rope_parameters=YARN, architectures=[LLAMA]),
    "longrope": lambda: LlamaConfig(**SIZES, rope_parameters=LONGROPE, architectures=[LLAMA]),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        sliding_window=BLOCK,
        layer_types=["sliding_attention", "full_attention"],
        architectures=["Gemma3ForCausalLM"],
    ),
    "granite": lambda: GraniteConfig(
        **SIZES, rope_parameters=PLAIN, architectures=["GraniteForCausalLM"]
    ),
}


class Said(logging.Handler):
    """What was logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def tried(name: str, folder: Path) -> dict[str, Any]:
    """One engine."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.inputs import TokensPrompt

    from headrace_decode.attention.settings import SparseSettings
    from headrace_decode.compression.engine.settings import CompressionSettings
    from headrace_engine.connector.connector import HeadraceConnector
    from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER

    MODELS[name]().save_pretrained(folder / name)
    store = {"name": f"store-{name}", "folder": str(folder), "dram_bytes": 32 << 20, "node": False}
    composite = beside(store_connector(store), blending_connector(store))
    said = Said()
    logging.getLogger("headrace").addHandler(said)
    llm = LLM(
        str(folder / name),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        num_gpu_blocks_override=BLOCKS,
        worker_cls=EXTENSIBLE_WORKER,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[True],
        additional_config={
            **SparseSettings().additional_config(),
            **CompressionSettings().additional_config(),
        },
        kv_transfer_config=KVTransferConfig(**composite),
    )
    prompt = TokensPrompt(prompt_token_ids=[n * 7 % 500 + 5 for n in range(TOKENS)])
    [why] = llm.collective_rpc("headrace_unsupported")
    cached = []
    for extra in (
        None,
        {"sparse": 0.1},
        {"compression": 0.25},
        {"kv_transfer_params": {BLENDING_KEY: {"runs": [[5, 9, 200, 9, b"x" * 64]]}}},
    ):
        params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False, extra_args=extra)
        [output] = llm.generate(prompt, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
        cached.append(output.num_cached_tokens)
    core: Any = llm.llm_engine.engine_core.engine_core
    connector: Any = core.scheduler.connector
    stored = next(each for each in connector._connectors if isinstance(each, HeadraceConnector))
    blocks = stored.arena.stats()["blocks"]
    logging.getLogger("headrace").removeHandler(said)
    llm.llm_engine.engine_core.shutdown()
    del llm, core, connector, stored
    ensure_kv_transfer_shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"why": why, "cached": cached, "stored": blocks, "said": said.lines}


def main() -> None:
    folder = Path(sys.argv[1])
    say({name: tried(name, folder) for name in MODELS})


if __name__ == "__main__":
    main()

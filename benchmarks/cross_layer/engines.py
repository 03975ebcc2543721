"""One engine of one kind: its blocks, its times, the bytes that it leaves in the store."""

from __future__ import annotations

import json
import random
import time
import uuid
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY
from headrace_prefill.cross_layer.engine.plugin import register

LAYERS, VOCABULARY = 30, 49152
CONFIG = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCK, STEP_TOKENS, REPEATS, ANSWER = 128, 2048, 2, 32
STORE_BYTES = 64 << 20
PATIENCE_S = 30.0


def measured(folder: Path, kind: str, prompts: tuple[int, ...]) -> dict[str, Any]:
    """Blocks, seconds by prompt tokens on the wall's and the CPU's clock, and stored bytes of a
    block. Starts two engines."""
    model = _model(folder, kind)
    llm = _open(model, kind)
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    _seconds(llm, _noise(64, 0), 2)  # compiles, allocates
    found: dict[str, Any] = {name: {} for name in ("ttft_s", "ttft_cpu_s", "tpot_s", "tpot_cpu_s")}
    for tokens in prompts:
        cold = _least([_seconds(llm, _noise(tokens, seed), 1) for seed in range(REPEATS)])
        kept = _noise(tokens, REPEATS - 1)  # in the prefix cache
        first, whole = (
            _least([_seconds(llm, kept, n) for _ in range(REPEATS)]) for n in (1, 1 + ANSWER)
        )
        for clock, name in enumerate(("_s", "_cpu_s")):
            found[f"ttft{name}"][str(tokens)] = cold[clock]
            found[f"tpot{name}"][str(tokens)] = (whole[clock] - first[clock]) / ANSWER
    _close(llm)
    stored = _stored_bytes(model, kind)
    return {**found, "blocks": blocks, "stored_bytes": stored}


def _model(folder: Path, kind: str) -> Path:
    """Return a folder with a config.json; weights are vLLM's dummies."""
    model = folder / kind
    model.mkdir(exist_ok=True)
    described: dict[str, Any] = {**CONFIG, "architectures": ["LlamaForCausalLM"]}
    if kind != "vanilla":
        described["architectures"] = ["KVFusionLlamaForCausalLM"]
        described["kv_fusion"] = {"kind": kind, "storage_layers": LAYERS // 2}
    (model / "config.json").write_text(json.dumps(described))
    return model


def _open(model: Path, kind: str, **options: Any) -> LLM:
    register()
    return LLM(
        str(model),
        load_format="dummy",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_num_batched_tokens=STEP_TOKENS,
        kv_sharing_fast_prefill=kind != "vanilla",
        **options,
    )


def _close(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _seconds(llm: LLM, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Return the wall and CPU seconds of one greedy answer of this many tokens."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    wall, cpu = time.perf_counter(), time.process_time()
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - wall, time.process_time() - cpu


def _least(runs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the minimum over runs of each clock, wall and CPU."""
    return min(wall for wall, _ in runs), min(cpu for _, cpu in runs)


def _noise(tokens: int, seed: int) -> list[int]:
    return random.Random(f"{tokens} {seed}").choices(range(3, VOCABULARY), k=tokens)


def _stored_bytes(model: Path, kind: str) -> int:
    """Return the bytes of a prompt's only block in the store's DRAM."""
    name = f"headrace-bench-{uuid.uuid4().hex[:8]}"
    transfer = KVTransferConfig(
        kv_connector="HeadraceConnector",
        kv_connector_module_path="headrace_engine.store_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"name": name, "dram_bytes": STORE_BYTES, "node": False},
    )
    llm = _open(model, kind, kv_transfer_config=transfer)
    try:
        with Arena.create_or_attach(name, STORE_BYTES) as arena:
            deadline = time.monotonic() + PATIENCE_S
            while not (ready := (arena.table["state"] == READY).nonzero()[0]).size:
                if time.monotonic() > deadline:
                    raise RuntimeError("the engine saved no block")
                _seconds(llm, _noise(BLOCK + 1, 0), 2)
            return int(arena.view(int(ready[0])).nbytes)
    finally:
        _close(llm)
        (Path("/dev/shm") / name).unlink(missing_ok=True)

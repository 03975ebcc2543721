"""32K tokens of a 7B model on a card that is limited to 24 GB: peak bytes, and time of a token.

The models have the shapes of Llama 2 7B and of Mistral 7B (8 KV heads in place of 32) with random
weights, and the former also with one layer's KV for two (`kind: fused`). An engine in a separate
process computes a prompt of 32,704 random tokens and answers with 64. torch may not allocate more
than the cap leaves. The peak is the memory in use as the card reports it, read every 2 ms. The
limit of a token's time is the time to read weights and KV once, at the speed of a copy within the
card. An engine that cannot hold the prompt fails before it starts, and is listed as such.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.noise import noise_calibration
from benchmarks.gpu.parts import Report
from benchmarks.gpu.timing import DEVICE, empty_cache, milliseconds
from benchmarks.kvstore.engine_node import noise
from headrace_engine.extensions.extension import EXTENSIBLE_WORKER

TOKENS, ANSWER, STEP = 32768, 64, 2048
CAP_BYTES, ENGINE_BYTES, MIXED_BYTES = 23_800_000_000, 22_800_000_000, 700_000_000
"""Maximum bytes in use; bytes that the engine is configured with; extra bytes of mixed blocks."""
COPIED_BYTES = 4 << 30
PAGE = 32

LLAMA = LLAMA_8B | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "max_position_embeddings": TOKENS,
    "rope_theta": 1e6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = LLAMA | {"num_key_value_heads": 8, "intermediate_size": 14336}
FUSED = LLAMA | {
    "architectures": ["KVFusionLlamaForCausalLM"],
    "kv_fusion": {"kind": "fused", "storage_layers": 16},
}
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8, 32 KV heads": (LLAMA, {"kv_cache_dtype": "fp8"}),
    "FusedKV, 32 KV heads in 16 layers": (FUSED, {"beside": MIXED_BYTES}),
    "bf16, 8 KV heads": (GROUPED, {}),
    "bf16, 8 KV heads, sparse attention to 10 %": (GROUPED, {"share": 0.1}),
    "bf16, 32 KV heads": (LLAMA, {}),
}
"""Name: config.json, and the engine's arguments."""


SMALL = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
}
"""What a dry run has instead, with half as many layers with KV, and half the KV heads, if fewer."""
SMALL_TOKENS, SMALL_ANSWER = 2560, 8


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Return the result of each arm's process, or the reason why it has none. In a dry run, raises
    RuntimeError for an arm whose process fails."""
    found: dict[str, Any] = {}
    for name in ARMS:
        command = [sys.executable, "-m", "benchmarks.gpu.card", name, str(int(dry))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if dry and done.returncode:
            raise RuntimeError(f"the arm {name} ended with {done.returncode}")
        lines = done.stdout.strip().splitlines() or ["{}"]
        told = json.loads(lines[-1]) if done.returncode == 0 else {}
        found[name] = told or {"refused": f"its process ended with {done.returncode}; see above"}
        if dry and "refused" in told:
            raise RuntimeError(f"the arm {name} was refused: {told['refused']}")
        report(found)
    return found


class Peak:
    """The most bytes of the card that were taken while it was looked at."""

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            free, total = memory()
            self.bytes = max(self.bytes, total - free)


def memory() -> tuple[int, int]:
    """Return the card's free and total bytes; in a dry run, the machine's."""
    if DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)
    found = psutil.virtual_memory()
    return found.available, found.total


def arm(name: str, dry: bool) -> dict[str, Any]:
    """One arm, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    model, given = ARMS[name]
    options = dict(given)
    engine_bytes = ENGINE_BYTES - options.pop("beside", 0)
    copied = 1 << 20 if dry else COPIED_BYTES
    bytes_a_ms = copied / _copy_ms(copied)
    free, total = memory()
    own = total - free
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction((CAP_BYTES - own) / total)
    if dry:
        model = _small(model)
    peak = Peak()
    with tempfile.TemporaryDirectory() as folder, peak.watched():
        share = min(0.9, engine_bytes / total)
        found = _engine(Path(folder), model, options, share, dry)
    if "refused" in found:
        return found
    return found | {"peak_bytes": peak.bytes, "limit_ms": found["read_bytes"] / bytes_a_ms}


def _small(model: dict[str, Any]) -> dict[str, Any]:
    """Return the model of a dry run with the same relations of heads and layers."""
    small = model | SMALL
    small["num_key_value_heads"] = 4 if model["num_key_value_heads"] == 32 else 2
    if "kv_fusion" in model:
        small["kv_fusion"] = model["kv_fusion"] | {"storage_layers": 2}
    return small


def _copy_ms(copied: int) -> float:
    """Return the milliseconds of a copy within the card that reads and writes so many bytes in
    total."""
    there, here = torch.empty(2, copied // 2, dtype=torch.uint8, device=DEVICE)
    took = statistics.median(milliseconds(partial(there.copy_, here)) for _ in range(10))
    del there, here
    empty_cache()
    return took


def _engine(
    folder: Path, model: dict[str, Any], options: dict[str, Any], share: float, dry: bool
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from headrace_prefill.cross_layer.engine.plugin import register

    register()
    (folder / "config.json").write_text(json.dumps(model))
    given = dict(options)
    extra = None
    longest, answer = (SMALL_TOKENS, SMALL_ANSWER) if dry else (TOKENS, ANSWER)
    if (chosen := given.pop("share", None)) is not None:
        given |= _sparse(folder, model)
        extra = {"sparse": chosen}
    try:
        llm = LLM(
            str(folder),
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=4,
            max_num_batched_tokens=min(STEP, longest),
            enable_prefix_caching=False,
            gpu_memory_utilization=share,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "PIECEWISE" if extra else "FULL_DECODE_ONLY",
            },
            **given,
        )
    except ValueError as error:
        return {"refused": str(error).split("\n")[0]}
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    blocks = cache.num_gpu_blocks or 0
    sampling = SamplingParams(
        max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
    )

    def answered(tokens: int) -> tuple[float, list[float]]:
        """Return the seconds to the first token, and those between the tokens after it."""
        began_s, times = time.perf_counter(), list[float]()
        prompt = [token % model["vocab_size"] for token in noise(tokens, seed=tokens)]
        engine.add_request("one", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                times += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(times))
        return times[0] - began_s, [b - a for a, b in pairwise(times)]

    answered(min(STEP, longest // 2) + 100)  # kernels are compiled
    first_s, gaps_s = answered(longest - answer)
    [weights] = llm.apply_model(_weights_bytes)
    kv = _kv_bytes(engine.vllm_config.compilation_config.static_forward_context)
    kv_tokens = blocks * cache.block_size
    return {
        "weights_bytes": weights,
        "kv_bytes_a_token": kv / kv_tokens,
        "kv_tokens": kv_tokens,
        "first_token_s": first_s,
        "token_ms": 1e3 * statistics.median(gaps_s),
        "slowest_token_ms": 1e3 * max(gaps_s),
        "read_bytes": weights + kv / kv_tokens * longest,
    }


def _weights_bytes(model: torch.nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())


def _kv_bytes(layers: dict[str, Any]) -> int:
    """Return the bytes of the caches of an engine's layers; shared caches count once."""
    caches = {each.kv_cache.data_ptr(): each.kv_cache for each in layers.values()}
    return sum(each.numel() * each.element_size() for each in caches.values())


def _sparse(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    from headrace_decode.attention.settings import SparseSettings

    file = noise_calibration(folder / "noise.safetensors", model, PAGE)
    settings = SparseSettings(page_tokens=PAGE, calibration=str(file))
    return {"worker_cls": EXTENSIBLE_WORKER, "additional_config": settings.additional_config()}


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of each arm that could hold the prompt: peak GB, ms a token, and ms over
    the limit."""
    told: dict[str, float] = {}
    for name, one in found.items():
        if "refused" not in one:
            told[f"card_24gb_peak_gb.{name}"] = one["peak_bytes"] / 1e9
            told[f"card_24gb_token_ms.{name}"] = one["token_ms"]
            told[f"card_24gb_token_vs_limit.{name}"] = one["token_ms"] / one["limit_ms"]
    return told


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table of the measurements."""
    head = (
        *("KV", "a token's, KiB", "tokens that the cache holds", "peak, GB"),
        *("first token, s", "a token, ms", "slowest, ms", "over its limit"),
    )
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for name, one in found.items():
        if "refused" in one:
            lines.append(f"| {name} | {one['refused']}" + " | " * (len(head) - 2) + " |")
            continue
        row = (
            *(f"{one['kv_bytes_a_token'] / 1024:.0f}", f"{one['kv_tokens']:,}"),
            *(f"{one['peak_bytes'] / 1e9:.1f}", f"{one['first_token_s']:.1f}"),
            *(f"{one['token_ms']:.1f}", f"{one['slowest_token_ms']:.1f}"),
            f"{one['token_ms'] / one['limit_ms']:.2f}",
        )
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(arm(sys.argv[1], sys.argv[2] == "1")))

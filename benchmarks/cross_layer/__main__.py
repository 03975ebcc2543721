"""Savings and costs of models whose upper layers keep no KV, against vLLM's own Llama.

    python -m benchmarks.cross_layer --json FILE [--quick] [--threads N]

All have SmolLM2-135M's shapes (30 layers, 9 heads, 3 KV heads of 64, bfloat16) and random weights;
15 layers keep KV. Engines run one at a time in this process, vLLM's Llama first and again last:
`drift` is its second time to the first token over its first. Each number is the minimum of several
runs. `*_cpu_*` are the same for CPU time, which other programs on the machine do not lengthen.

    blocks_vs_vanilla           KV blocks in the same memory (target 1.95 or more)
    ttft_vs_vanilla             time to the first token, by kind and prompt tokens (lite: 0.58 or
                                less at 8,192)
    tpot_lite_vs_vanilla        time per output token after 2,048 tokens (1.05 or less)
    tpot_fused_vs_vanilla       the same
    tpot_8k_*_vs_vanilla        after 8,000 tokens
    store_bytes_vs_vanilla      bytes of a stored block (0.5)
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

KINDS = ("lite", "fused")
PROMPTS = (2048, 4096, 8000)
"""The longest leaves room for an answer below the model's 8,192 positions."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="2,048 tokens only")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    options = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_COMPILE_DISABLE": "1",
    }
    from benchmarks.cross_layer.engines import measured

    kinds, prompts = KINDS, PROMPTS[:1] if options.quick else PROMPTS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in ("vanilla", *kinds, "vanilla again"):
            found[arm] = measured(Path(folder), arm.split()[0], prompts)
            print(arm, json.dumps(found[arm]), flush=True)
            options.json.write_text(json.dumps({"runs": found}, indent=1))
    figures = compared(found, kinds, prompts)
    options.json.write_text(json.dumps({"figures": figures, "runs": found}, indent=1))
    print(json.dumps(figures, indent=1))


def compared(found: dict[str, Any], kinds: tuple[str, ...], prompts: tuple[int, ...]) -> Any:
    """Return the figures of the module's docstring."""
    once, again = found["vanilla"], found["vanilla again"]

    def ratio(kind: str, what: str, tokens: int) -> float:
        least = min(run[what][str(tokens)] for run in (once, again))
        return float(found[kind][what][str(tokens)] / least)

    figures: dict[str, Any] = {
        "blocks_vs_vanilla": found["lite"]["blocks"] / once["blocks"],
        "store_bytes_vs_vanilla": found["lite"]["stored_bytes"] / once["stored_bytes"],
        "drift": {n: again["ttft_s"][str(n)] / once["ttft_s"][str(n)] for n in prompts},
    }
    for clock in ("", "_cpu"):
        figures[f"ttft{clock}_vs_vanilla"] = {
            kind: {n: ratio(kind, f"ttft{clock}_s", n) for n in prompts} for kind in kinds
        }
        for kind in kinds:
            for name, n in zip(
                ("tpot", "tpot_8k"), sorted({prompts[0], prompts[-1]}), strict=False
            ):
                figures[f"{name}_{kind}{clock}_vs_vanilla"] = ratio(kind, f"tpot{clock}_s", n)
    return figures


if __name__ == "__main__":
    main()

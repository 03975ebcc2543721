"""Measurements that need a GPU; prints Markdown with the card, its driver and the date.

    python -m benchmarks.gpu --json FILE

Needs one NVIDIA card of 80 GB and `headrace[gpu]`; takes some minutes.

    sparse_decode_speedup_128k_rows_N   decode attention of N rows with 128K tokens of KV, heads as
                                        Llama 3 8B: time of vLLM's fastest kernel over all KV / time
                                        of sparse attention with 5 % of the pages, scores and choice
                                        included (target 5)
    load_verified_vs_copy,              the store's loads against a plain copy of pinned memory of
    load_unverified_vs_copy             the same size, 1,024 blocks of Llama 3 8B at TP=2 (target
                                        0.85)
    save_vs_copy                        saves with checksums, likewise
    load_fp8_vs_raw, load_int4_vs_raw   bandwidth of the engine's bytes under a codec
    compute_beside_loads_vs_alone       products of matrices while blocks are loaded (target 1)
    ttft_dram_vs_cold_N                 an engine's time to first token with N tokens in DRAM
    ttft_nvme_vs_cold_N                 the same from a StoreNode's disk
    ttft_peer_vs_cold_N                 the same from a second StoreNode's DRAM, on this machine
    itl_p99_beside_loads_vs_none        latencies of running requests while KV of others is loaded
    nvme_direct_vs_host                 loads from disk straight into the card's memory, over those
                                        through host memory; left out where the node cannot
    split_ttft_pN_vs_one,               two engines on the card, one for prefill and one for decode,
    split_itl_pN_vs_one                 over one engine that does both: first tokens of prompts, and
                                        latencies of the requests that decode at the same time
    fused_decode_triton_vs_torch        decode attention of a layer that mixes two layers' KV, 8
                                        rows of 32K tokens: mixed by our Triton kernel / by torch
    fused_decode_triton_vs_one_layer    the same / attention to one layer's KV without mixing
    card_24gb_peak_gb.KV,               an engine that is held to 24 GB, with 32K tokens of a 7B
    card_24gb_token_ms.KV               model (targets 23.8 and 120)
    drafting_N_at_once                  tokens per second of N requests with drafts, over without

Each part runs in a process of its own; one that fails is named and left out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

PARTS = {
    "copies": "Copies of the KV store",
    "files": "Loads from disk",
    "engine": "An engine with the KV store",
    "split": "Prefill and decode apart on one card",
    "drafting": "Drafting",
    "card": "32K tokens of a 7B model on a card of 24 GB",
    "sparse": "Sparse decode attention",
    "cross_layer": "Layers that mix two layers' KV",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--part", choices=PARTS, help="one part; what it found goes to FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU")
    if options.part:
        found = importlib.import_module(f"benchmarks.gpu.{options.part}").measured()
        options.json.write_text(json.dumps(found))
        return
    print(machine())
    told: dict[str, Any] = {"machine": machine(), "figures": {}}
    for name, title in PARTS.items():
        part, found = importlib.import_module(f"benchmarks.gpu.{name}"), found_by(name)
        print(f"\n### {title}\n")
        if found is None:
            print("Not measured: the part failed; see above.", flush=True)
            continue
        told[name] = found
        told["figures"] |= part.figures(found)
        print(part.markdown(found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(told, indent=1))
    print("\n" + "\n".join(f"- `{name}`: {value:.2f}" for name, value in told["figures"].items()))


def found_by(part: str) -> dict[str, Any] | None:
    """Run a part in a separate process and return its result; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--json", str(path)]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return None if done.returncode else found


def machine() -> str:
    """Card, driver, versions and date."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    day = datetime.date.today().strftime("%B %d, %Y")
    return f"{card}, CUDA {torch.version.cuda}, torch {torch.__version__}, {day}"


if __name__ == "__main__":
    main()

"""What only a GPU can show; prints Markdown with the card, its driver and the date.

    python -m benchmarks.gpu --json FILE

Needs one NVIDIA card of 80 GB and `headrace[gpu]`; takes some minutes.

    sparse_decode_speedup_128k_rows_N   decode attention of N rows with 128K tokens of KV, heads as
                                        Llama 3 8B: time of vLLM's fastest kernel over all KV / time
                                        of sparse attention with 5 % of the units, scores and choice
                                        included (target 5)
    load_verified_vs_copy,              the store's loads against a plain copy of pinned memory of
    load_unverified_vs_copy             the same size, 1,024 blocks of Llama 3 8B at TP=2 (target
                                        0.85)
    save_vs_copy                        saves with checksums, likewise
    load_fp8_vs_raw, load_int4_vs_raw   bandwidth of the engine's bytes under a codec
    compute_beside_loads_vs_alone       products of matrices while blocks are loaded (target 1)
    ttft_dram_vs_cold_N                 an engine's time to first token with N tokens in DRAM
    itl_p99_beside_loads_vs_none        latencies of running requests while others' KV is loaded
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU")
    from benchmarks.gpu import copies, engine, sparse

    print(machine())
    told: dict[str, Any] = {"machine": machine(), "figures": {}}
    for title, part in (
        ("Copies of the KV store", copies),
        ("An engine with the KV store", engine),
        ("Sparse decode attention", sparse),
    ):
        found = part.measured()
        told[part.__name__.rpartition(".")[2]] = found
        told["figures"] |= part.figures(found)
        print(f"\n### {title}\n\n{part.markdown(found)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(told, indent=1))
    print("\n" + "\n".join(f"- `{name}`: {value:.2f}" for name, value in told["figures"].items()))


def machine() -> str:
    """Card, driver, versions and date."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    day = datetime.date.today().strftime("%B %d, %Y")
    return f"{card}, CUDA {torch.version.cuda}, torch {torch.__version__}, {day}"


if __name__ == "__main__":
    main()

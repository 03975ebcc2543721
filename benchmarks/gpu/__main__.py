"""What only a GPU can show; prints Markdown with the card, its driver and the date.

    python -m benchmarks.gpu --json FILE

Needs one NVIDIA card of 80 GB and `headrace[gpu]`; takes some minutes.

    sparse_decode_speedup_128k_rows_N   decode attention of N rows with 128K tokens of KV, heads as
                                        Llama 3 8B: time of vLLM's fastest kernel over all KV / time
                                        of sparse attention with 5 % of the units, scores and choice
                                        included (target 5)
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU")
    from benchmarks.gpu import sparse

    found = sparse.measured()
    figures = sparse.figures(found)
    if options.json:
        told = {"machine": machine(), "figures": figures, "sparse": found}
        options.json.write_text(json.dumps(told, indent=1))
    print(f"{machine()}\n\n### Sparse decode attention\n\n{sparse.markdown(found)}\n")
    print("\n".join(f"- `{name}`: {value:.2f}" for name, value in figures.items()))


def machine() -> str:
    """Card, driver, versions and date."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    day = datetime.date.today().strftime("%B %d, %Y")
    return f"{card}, CUDA {torch.version.cuda}, torch {torch.__version__}, {day}"


if __name__ == "__main__":
    main()

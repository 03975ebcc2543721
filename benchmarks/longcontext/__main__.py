"""Error of answers after KV of a long context is dropped, by rule, at equal bytes.

    python -m benchmarks.longcontext --json FILE [--texts N] [--tokens N] [--processes N] [--quick]

SmolLM2-135M in fp32. A context is prefilled exactly; KV is dropped once, by rules that do not know
the questions; then questions and answers are computed over the rest. NVIDIA's kvpress runs on the
same tokens in a separate environment, which the first run makes in build/kvpress. FILE keeps the
results so far, so a run can be resumed.

    kl_vs_best_kvpress_at_25pct    KL of ours / of the best press, over the answers (target 0.85)
    arms                           KL, top-1, perplexity, recall of facts by depth, and of the first
                                   sentence after five turns, of each arm at 50, 25 and 12 %
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.longcontext.texts import FEWEST_COPY_TOKENS, KINDS

TOKENS, QUICK_TOKENS = 3000, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--model", metavar="FOLDER", help="or a name; default: smollm2-135m-instruct"
    )
    parser.add_argument("--texts", type=int, default=len(KINDS), metavar="N")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="of a context")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--tuning", action="store_true", help="on the texts for tuning")
    parser.add_argument("--only", choices=("kvpress", "ours"), help="one side now, the other later")
    parser.add_argument("--ablated", type=int, default=len(KINDS), metavar="N", help="texts")
    parser.add_argument(
        "--predictor",
        type=Path,
        metavar="FILE",
        help="of `headrace lab calibrate compression`: more arms",
    )
    parser.add_argument("--quick", action="store_true", help="two short texts, no ablations")
    options = parser.parse_args()
    if options.quick:
        options.texts, options.tokens, options.ablated = 2, QUICK_TOKENS, 0
    if options.texts > KINDS.index("copy") and options.tokens < FEWEST_COPY_TOKENS:
        parser.error(
            f"--tokens {options.tokens}: a copied passage takes {FEWEST_COPY_TOKENS}; "
            f"--texts {KINDS.index('copy')} leaves it out"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(measured(options), indent=1))


def measured(options: argparse.Namespace) -> dict[str, object]:
    from benchmarks.longcontext.figures import figures
    from benchmarks.longcontext.judge import Row
    from benchmarks.longcontext.measure import ours, peers
    from headrace.model import resolve

    folder, held_out = resolve(options.model), not options.tuning
    kept: dict[str, list[Row]] = {}
    if options.json.is_file():
        kept = json.loads(options.json.read_text())["rows"]
    begun = time.monotonic()

    def found() -> dict[str, object]:
        return figures([row for some in kept.values() for row in some])

    with ProcessPoolExecutor(
        options.processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        tasks: dict[Future[list[Row]], str] = {}
        for number in range(options.texts):
            if f"kvpress {number}" not in kept and options.only != "ours":
                one = pool.submit(peers, folder, number, options.tokens, held_out)
                tasks[one] = f"kvpress {number}"
            if f"ours {number}" not in kept and options.only != "kvpress":
                ablated = number < options.ablated
                asked = folder, number, options.tokens, held_out, ablated, options.predictor
                one = pool.submit(ours, *asked)
                tasks[one] = f"ours {number}"
        for task in as_completed(tasks):
            kept[tasks[task]] = task.result()
            options.json.write_text(json.dumps({"figures": found(), "rows": kept}, indent=1))
            print(f"{tasks[task]}: done after {time.monotonic() - begun:.0f} s", flush=True)
    return found()


if __name__ == "__main__":
    main()

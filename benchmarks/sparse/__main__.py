"""How well rules choose what a decode step attends to, at equal budgets, against the exact model.

    python -m benchmarks.sparse --json FILE [--texts N] [--processes N] [--plots FOLDER] [--tuning]
    python -m benchmarks.sparse --json FILE --part speed

SmolLM2-135M in fp32 on texts of 4,500 to 8,192 tokens (`texts`). A text's prefix is computed
exactly; in its last 64 positions each layer's attention sees chosen pages of 16 tokens alone, 10 %
of them, one choice for each KV head. The first five texts, one of each kind, are measured with all
that was ablated, too. Ours has bases that three of the texts for tuning taught.
FILE keeps what is done, and FILE.npz the bases, so a run can go on later. `--tuning` takes the
texts that constants were chosen on; figures come from the others.

    recall_gap_closed             (ours - mean) / (oracle - mean) of the share of the exact model's
                                  attention that falls on chosen pages (target 0.8)
    kl_at_10pct_vs_best_baseline  KL of ours / of the best of mean, Quest, HATA, KVStar, sink +
                                  recent (target 0.5; of the worst text 0.8)
    kl_vs_oracle                  KL of ours / of the pages of highest true attention (target 2.5)
    recall_tasks_vs_dense         share of the exact model's right answers that stay right (0.97)
    bytes_vs_k                    of what ours keeps / of keys in 16 bits (target 0.12)

`--part speed` is `speed`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.sparse.texts import KINDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--model", metavar="FOLDER", help="or a name; default: smollm2-135m-instruct"
    )
    parser.add_argument("--part", choices=("quality", "speed"), default="quality")
    parser.add_argument("--texts", type=int, default=12, metavar="N")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--tuning", action="store_true", help="on the texts for tuning")
    parser.add_argument("--ablated", type=int, default=len(KINDS), metavar="N", help="texts")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = speed(options) if options.part == "speed" else quality(options)
    print(json.dumps(found, indent=1))


def speed(options: argparse.Namespace) -> dict[str, object]:
    from benchmarks.sparse.speed import measured

    found = measured()
    options.json.write_text(json.dumps({"figures": found}, indent=1))
    return found


def quality(options: argparse.Namespace) -> dict[str, object]:
    from benchmarks.sparse.figures import figures, plots
    from benchmarks.sparse.measure import Row, measured
    from headrace.model import resolve

    folder = resolve(options.model)
    kept: dict[str, list[Row]] = {}
    if options.json.is_file():
        kept = json.loads(options.json.read_text())["rows"]
    bases, begun = str(options.json.with_suffix(".npz")), time.monotonic()
    with ProcessPoolExecutor(
        options.processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        tasks = {
            pool.submit(
                measured, folder, number, not options.tuning, number < options.ablated, bases
            ): number
            for number in range(options.texts)
            if str(number) not in kept
        }
        for task in as_completed(tasks):
            kept[str(tasks[task])] = task.result()
            found = figures([row for some in kept.values() for row in some])
            options.json.write_text(json.dumps({"figures": found, "rows": kept}, indent=1))
            print(
                f"text {tasks[task]}: {len(kept)} of {options.texts} after "
                f"{time.monotonic() - begun:.0f} s, kl_at_10pct_vs_best_baseline: "
                f"{found['kl_at_10pct_vs_best_baseline']:.3f}",
                flush=True,
            )
    found = figures([row for some in kept.values() for row in some])
    if options.plots:
        plots(found, options.plots)
    return found


if __name__ == "__main__":
    main()

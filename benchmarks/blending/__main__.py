"""How well rules of recomputation correct reused KV, at equal budgets, against the exact model.

    python -m benchmarks.blending --json FILE [--arms GROUP...] [--again ARM...] [--prompts N]

Prompts hold several documents, of which 50, 80 or 95 % were seen elsewhere: prefilled alone, after
a system prompt, or inside another prompt. Their KV is placed, corrected by each rule, and the exact
model's answer of 48 tokens is scored over it. FILE keeps a row of each prompt, arm and budget, and
a later run measures those that are missing; `--again` drops an arm's rows first. Groups of arms:
peers, ours, ablations, all. Rows of peers are the same in every run. `--tuning` takes the texts
that the rule's constants were chosen on; figures come from the others.

    kl_vs_best_peer_rule        KL of ours / of the best peer rule at 10, 15 and 30 % (target 0.5;
                                0.6 at 10 %); "worst" is the worst prompt (target 0.8 at 15 %)
    recompute_vs_best_peer_rule budget at which ours reaches the peer's KL / the peer's (target 0.5)
    question_free               KL of ours without a question / of the best peer rule (target 0.8)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.blending.figures import MAIN, Row, figures, plots
from benchmarks.blending.measure import GROUPS, done, measured, plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--model", metavar="FOLDER", help="or a name; default: smollm2-135m-instruct"
    )
    parser.add_argument("--prompts", type=int, default=20, metavar="N")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--tuning", action="store_true", help="on the texts for tuning")
    parser.add_argument("--arms", nargs="+", choices=GROUPS, default=["all"], metavar="GROUP")
    parser.add_argument("--again", nargs="+", default=[], metavar="ARM", help="drop its rows")
    parser.add_argument("--answer", type=int, default=48, metavar="TOKENS")
    options = parser.parse_args()
    from headrace.model import resolve

    folder = resolve(options.model)
    kept: dict[str, list[Row]] = {}
    if options.json.is_file():
        kept = json.loads(options.json.read_text())["rows"]
    for number, some in kept.items():
        kept[number] = [row for row in some if row["arm"] not in options.again]
    wanted = {(arm, budget) for arm, _, budget in plan(options.arms)}
    left = [n for n in range(options.prompts) if wanted - done(kept.get(str(n), []))]
    begun = time.monotonic()
    with ProcessPoolExecutor(
        options.processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        fixed = options.prompts, not options.tuning, options.arms, options.answer
        tasks = {
            pool.submit(measured, folder, number, *fixed, done(kept.get(str(number), []))): number
            for number in left
        }
        for finished, task in enumerate(as_completed(tasks), 1):
            kept.setdefault(str(tasks[task]), []).extend(task.result())
            rows = [row for some in kept.values() for row in some]
            found = figures(rows)
            options.json.write_text(json.dumps({"figures": found, "rows": kept}, indent=1))
            now = found.get(f"{MAIN:.2f}", {}).get("kl_vs_best_peer_rule", float("nan"))
            print(
                f"prompt {tasks[task]}: {finished} of {len(left)} after "
                f"{time.monotonic() - begun:.0f} s, kl_vs_best_peer_rule at {MAIN:.0%}: {now:.3f}",
                flush=True,
            )
    rows = [row for some in kept.values() for row in some]
    print(json.dumps(figures(rows), indent=1))
    if options.plots:
        plots(rows, options.plots)


if __name__ == "__main__":
    main()

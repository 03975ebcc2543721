"""Quality of answers with lossy techniques, against the exact model.

    python -m benchmarks.quality --json FILE [--technique blending store] [--plots FOLDER]

Prompts are multi-document questions (`headrace_lab.texts.prompts`) and tasks with known answers
(`tasks`), made from texts of installed packages. The model is SmolLM2-135M in fp32. FILE keeps the
results so far, so a run can be resumed.

    kl, kl_p99, top1, perplexity   as in `headrace_lab.models.exact.Score`, means over prompts
    task_score_vs_exact            share of the answers' tokens that are right / the exact model's,
                                   over task prompts of which it gets 0.8 right (target 0.97 for
                                   blending at its default ratio)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.measure import measured

SOLVED = 0.8
Row = dict[str, Any]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the means by arm and budget."""
    found: dict[str, Any] = {}
    solved = {r["prompt"] for r in rows if r["arm"] == "exact" and r.get("task", 0.0) >= SOLVED}
    exact = np.mean([r["task"] for r in rows if r["arm"] == "exact" and r["prompt"] in solved] or 0)
    for arm, budget in dict.fromkeys((row["arm"], row["budget"]) for row in rows):
        mine = [row for row in rows if (row["arm"], row["budget"]) == (arm, budget)]
        texts = [row for row in mine if "task" not in row]
        tasks = [row["task"] for row in mine if row["prompt"] in solved]
        entry: dict[str, float] = {"prompts": len(texts), "tasks": len(tasks)}
        for name in ("kl", "kl_p99", "top1", "perplexity") if texts else ():
            entry[name] = float(np.mean([row[name] for row in texts]))
        if tasks:
            entry["task_score_vs_exact"] = float(np.mean(tasks) / exact)
        found[f"{arm} {budget:.2f}"] = entry
    return found


def plots(found: dict[str, Any], folder: Path) -> None:
    """KL by budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, entry in found.items():
        arm, _, budget = name.rpartition(" ")
        if entry.get("kl"):
            curves.setdefault(arm, []).append((float(budget), entry["kl"]))
    for arm, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=arm)
    axes.set(xlabel="budget", ylabel="KL, nats", yscale="log")
    axes.legend()
    figure.savefig(folder / "quality.png", dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--model", metavar="FOLDER", help="or a registry's name")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="of documents")
    parser.add_argument("--tasks", type=int, default=8, metavar="N", help="of each kind")
    parser.add_argument("--technique", nargs="+", default=["blending", "store"])
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    from headrace.model import resolve

    folder = resolve(options.model)
    kept: dict[str, list[Row]] = {}
    if options.json.is_file():
        kept = json.loads(options.json.read_text())["rows"]
    sizes = options.prompts, options.tasks
    names = [f"text {n}" for n in range(options.prompts)]
    names += [f"task {n}" for n in range(3 * options.tasks)]
    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        jobs = {
            pool.submit(measured, folder, name, sizes, options.technique): name
            for name in names
            if name not in kept
        }
        for job in as_completed(jobs):
            kept[jobs[job]] = job.result()
            found = figures([row for rows in kept.values() for row in rows])
            options.json.write_text(json.dumps({"figures": found, "rows": kept}, indent=1))
            print(f"{jobs[job]}: {len(kept)} of {len(names)}", flush=True)
    found = figures([row for rows in kept.values() for row in rows])
    print(json.dumps(found, indent=1))
    if options.plots:
        plots(found, options.plots)


if __name__ == "__main__":
    main()

"""Savings of eviction policies: ``python -m benchmarks.kvpolicy [--trace FILE] [--json FILE]``.

Replays a production trace and a synthetic workload through the store's own slot table and policies
at five capacities. Costs are those of `workload.Costs`. A prompt's saving is, over its leading
blocks that were found, the seconds to compute them less the seconds to load them.

- ``lru``, ``lfu`` (half-life 10 min), ``s3fifo``, all leaf first
- ``priority``: prompts of at most 32 blocks (interactive) above longer ones, LRU among equals
- ``ours``: cost-aware; it begins with nothing learned and learns during the replay
- ``foresight``: ours with the true next use in place of its forecast, for comparison only
- ``optimum``: the best schedule found with all prompts known; ``bound``: an upper bound of any
  schedule

``share_of_optimum`` is the share of the bound, so the true share of the optimum is no lower.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.kvpolicy import choice, tiers
from benchmarks.kvpolicy.foresight import Foresight
from benchmarks.kvpolicy.lfu import LFU
from benchmarks.kvpolicy.optimum import Clairvoyant
from benchmarks.kvpolicy.priority import Priority
from benchmarks.kvpolicy.replay import Replay
from benchmarks.kvpolicy.s3fifo import S3FIFO
from benchmarks.kvpolicy.workload import Costs, Workload, read_trace, synthetic
from headrace_kvstore.policy.base import Policy
from headrace_kvstore.policy.cost_aware import CostAware
from headrace_kvstore.policy.recency import LRU

CAPACITIES = (0.02, 0.05, 0.12, 0.3, 0.6)  # shares of the distinct blocks
INTERACTIVE_BLOCKS = 32
ARMS: dict[str, Callable[[Workload, int], Policy]] = {
    "lru": lambda work, slots: LRU(),
    "lfu": lambda work, slots: LFU(np.zeros(slots)),
    "s3fifo": lambda work, slots: S3FIFO.create(slots),
    "priority": lambda work, slots: Priority(),
    "ours": lambda work, slots: CostAware.create(),
    "foresight": Foresight,
}


def savings_s(work: Workload, costs: Costs) -> NDArray[np.float64]:
    """Return the seconds saved by a hit of m leading blocks, for m from 0."""
    depth = np.arange(int(np.diff(work.starts).max(initial=1)))
    return np.concatenate([[0.0], np.cumsum(costs.compute_s(depth) - costs.load_s)])


def measure(work: Workload, costs: Costs, prefix: str = "") -> dict[str, float]:
    saving_s = savings_s(work, costs)
    clairvoyant = Clairvoyant(work, saving_s)
    endless = clairvoyant.known
    half = len(work) // 2
    figures = {
        f"{prefix}prompts": float(len(work)),
        f"{prefix}blocks": float(len(work.blocks)),
        f"{prefix}distinct_blocks": float(work.distinct),
        f"{prefix}endless.hit_rate": float(endless.sum()) / len(work.blocks),
        f"{prefix}endless.seconds_saved": float(saving_s[endless].sum()),
    }
    interactive = (np.diff(work.starts) <= INTERACTIVE_BLOCKS).astype(np.int64)
    for k, share in enumerate(CAPACITIES, 1):
        slots = int(share * work.distinct)
        best = clairvoyant.solve(slots)
        found = {"optimum": best.hits}
        for name, make in ARMS.items():
            replay = Replay(work, costs, slots, make(work, slots))
            outcome = replay.run(interactive if name == "priority" else None)
            found[name] = outcome.hits
            figures[f"{prefix}cap{k}.{name}.blocks_written"] = float(outcome.written)
        figures[f"{prefix}cap{k}.blocks"] = float(slots)
        figures[f"{prefix}cap{k}.gigabytes"] = slots * costs.block_bytes / 1e9
        figures[f"{prefix}cap{k}.bound.seconds_saved"] = best.bound_s
        for name, hits in found.items():
            saved = saving_s[hits]
            at = f"{prefix}cap{k}.{name}"
            figures[f"{at}.hit_rate"] = float(hits.sum()) / len(work.blocks)
            figures[f"{at}.seconds_saved"] = float(saved.sum())
            figures[f"{at}.share_of_optimum"] = float(saved.sum()) / best.bound_s
            figures[f"{at}.first_half.seconds_saved"] = float(saved[:half].sum())
            figures[f"{at}.second_half.seconds_saved"] = float(saved[half:].sum())
    return figures


def table(figures: dict[str, float], prefix: str = "", part: str = "") -> str:
    """Markdown: seconds saved, hit rate and share of the bound; `part` for a half of the trace."""
    names = ["lru", "lfu", "s3fifo", "priority", "ours", "foresight", "optimum"]
    lines = [
        "| blocks | GB | " + " | ".join(names) + " | bound |",
        "|---:|---:|" + "---:|" * (len(names) + 1),
    ]
    for k in range(1, len(CAPACITIES) + 1):
        at = f"{prefix}cap{k}"
        cells = [f"{figures[f'{at}.blocks']:,.0f}", f"{figures[f'{at}.gigabytes']:,.0f}"]
        for name in names:
            cell = f"{figures[f'{at}.{name}.{part}seconds_saved']:,.0f} s"
            if not part:
                cell += f", {100 * figures[f'{at}.{name}.hit_rate']:.1f} %"
                cell += f" ({figures[f'{at}.{name}.share_of_optimum']:.3f})"
            cells.append(cell)
        cells.append("" if part else f"{figures[f'{at}.bound.seconds_saved']:,.0f} s")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(figures: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    ks = range(1, len(CAPACITIES) + 1)
    x = [figures[f"cap{k}.gigabytes"] for k in ks]
    for name in ("bound", *ARMS):
        y = [figures[f"cap{k}.{name}.seconds_saved"] for k in ks]
        axes.plot(x, y, marker="o", label=name, linewidth=2.5 if name == "ours" else 1.2)
    axes.set_xscale("log")
    axes.set_xlabel("capacity, GB of KV")
    axes.set_ylabel("prefill seconds saved")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description="Which eviction policy saves most.")
    parser.add_argument(
        "--trace", type=Path, default=Path("../shared/traces/mooncake_conversation.jsonl")
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw seconds over capacity")
    parser.add_argument(
        "--partial-blocks", action="store_true", help="count a prompt's last block though not full"
    )
    parser.add_argument(
        "--tiers", action="store_true", help="a disk below DRAM, with and without prefetch, instead"
    )
    parser.add_argument(
        "--choice", action="store_true", help="what one choice of victims costs, instead"
    )
    args = parser.parse_args()
    if args.tiers or args.choice:
        found: dict[str, float] = {}
        for slots in (10**4, 10**5, 10**6) if args.choice else ():
            found |= choice.measure(slots)
        if args.tiers:
            found |= tiers.measure(read_trace(args.trace), Costs(), CAPACITIES[:3])
        print("\n".join(f"{name} {value:,.3f}" for name, value in found.items()))
        if args.json is not None:
            args.json.write_text(json.dumps({"figures": found}, indent=2) + "\n")
        return
    start, costs = time.perf_counter(), Costs()
    work = read_trace(args.trace, partial_blocks=args.partial_blocks)
    figures = measure(work, costs)
    print(f"{work.name}: seconds saved, blocks found, (share of the bound)\n\n{table(figures)}\n")
    print(f"Second half alone\n\n{table(figures, part='second_half.')}\n")
    figures |= measure(synthetic(), costs, "synthetic.")
    print(f"Synthetic\n\n{table(figures, 'synthetic.')}\n")
    print(f"{time.perf_counter() - start:.0f} s")
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")
    if args.plot is not None:
        plot(figures, args.plot)


if __name__ == "__main__":
    main()

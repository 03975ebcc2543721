"""Figures, table and plot from samples. Pure, except for the two functions that write a file.

`summarise` sums up a repeat of a cell. A cell has the median of its repeats, with the minimum and
the maximum. A figure compares Headrace with a peer repeat by repeat, since repeats ran one after
the other, and is the median of these ratios: a machine that gets slower changes it less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import quantile
from benchmarks.serving.load import Load

PEERS = ("ray_pd", "vllm_x2", "vllm")
COMPARED = {"ttft_p50": "ttft_p50_s", "ttft_mean": "ttft_mean_s", "tok_s": "tok_s"}
TITLES = {"vllm": "vLLM", "vllm_x2": "2 vLLM", "ray_pd": "Ray P/D", "headrace": "Headrace"}
BEGIN, END = "<!-- {0}:begin -->", "<!-- {0}:end -->"


@dataclass(frozen=True)
class Repeat:
    """One arm's repeat of one cell: its measures (seconds, tokens/s) and what went wrong."""

    workload: str
    concurrency: int
    arm: str
    number: int
    measures: dict[str, float]
    requests: int
    errors: list[str] = field(default_factory=list)
    cores: dict[str, float] = field(default_factory=dict)
    plans: dict[str, int] = field(default_factory=dict)
    nixl_bytes: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    explained: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cell(self) -> str:
        """Name of the cell in the figures' names."""
        return f"{self.workload}.c{self.concurrency}"


def summarise(load: Load) -> dict[str, float]:
    """The measures of one repeat. Requests that failed count in none but as lost time in `tok_s`.

    Inter-token latencies (`itl`) are the gaps between chunks with content, so tokens that an arm
    batches into one chunk show as fewer, longer gaps; `tpot_p50_s` is by request, (last - first) /
    (tokens - 1).
    """
    good = [s for s in load.samples if s.error is None]
    ttfts = [s.arrivals_s[0] for s in good]
    gaps = [b - a for s in good for a, b in zip(s.arrivals_s, s.arrivals_s[1:], strict=False)]
    tpots = [
        (s.arrivals_s[-1] - s.arrivals_s[0]) / (s.output_tokens - 1)
        for s in good
        if s.output_tokens > 1
    ]
    tokens = sum(s.output_tokens for s in good)
    return {
        "ttft_p50_s": quantile(ttfts, 0.5),
        "ttft_mean_s": statistics.fmean(ttfts) if ttfts else math.nan,
        "ttft_p99_s": quantile(ttfts, 0.99),
        "itl_p50_s": quantile(gaps, 0.5),
        "itl_p99_s": quantile(gaps, 0.99),
        "tpot_p50_s": quantile(tpots, 0.5),
        "e2e_p50_s": quantile([s.e2e_s for s in good], 0.5),
        "tok_s": tokens / load.wall_s if load.wall_s else 0.0,
        "prompt_tokens": statistics.fmean(s.prompt_tokens for s in good) if good else 0.0,
        "wall_s": load.wall_s,
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and greatest; NaN of nothing."""
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return dict.fromkeys(("median", "min", "max"), math.nan)
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def cells(repeats: Sequence[Repeat]) -> list[dict[str, Any]]:
    """One JSON-able row for each cell and arm, in the order measured, its repeats included."""
    groups: dict[tuple[str, str], list[Repeat]] = {}
    for repeat in repeats:
        groups.setdefault((repeat.cell, repeat.arm), []).append(repeat)
    out = []
    for group in groups.values():
        first = group[0]
        names = first.measures
        row: dict[str, Any] = {
            "workload": first.workload,
            "concurrency": first.concurrency,
            "arm": first.arm,
            "repeats": len(group),
            "requests": sum(r.requests for r in group),
            "errors": sum(len(r.errors) for r in group),
        }
        row |= {name: spread(r.measures[name] for r in group) for name in names}
        row["raw"] = [asdict(r) for r in group]
        out.append(row)
    return out


def ratios(
    repeats: Sequence[Repeat], ours: str = "headrace", peers: Sequence[str] = PEERS
) -> dict[str, dict[str, float]]:
    """`CELL.MEASURE_vs_PEER` -> median, min and max of ours / the peer's, paired by repeat."""
    by_key = {(r.cell, r.arm, r.number): r for r in repeats}
    cell_names = list(dict.fromkeys(r.cell for r in repeats))
    out: dict[str, dict[str, float]] = {}
    for cell in cell_names:
        numbers = sorted(n for c, arm, n in by_key if c == cell and arm == ours)
        for name, measure in COMPARED.items():
            for peer in peers:
                pairs = [
                    by_key[cell, ours, n].measures[measure]
                    / by_key[cell, peer, n].measures[measure]
                    for n in numbers
                    if (cell, peer, n) in by_key and by_key[cell, peer, n].measures[measure] > 0
                ]
                known = spread(pairs)
                if not math.isnan(known["median"]):
                    out[f"{cell}.{name}_vs_{peer}"] = known
    return out


def figures(repeats: Sequence[Repeat]) -> dict[str, float]:
    """The figures: medians of `ratios`. For TTFT less than 1 is better, for tokens/s more."""
    return {name: round(known["median"], 4) for name, known in ratios(repeats).items()}


def markdown(document: Mapping[str, Any]) -> str:
    """Return the table of a run, with the machine and the date."""
    env = document["environment"]
    rows: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in document["cells"]:
        rows.setdefault((row["workload"], row["concurrency"]), {})[row["arm"]] = row
    arms = [a for a in TITLES if any(a in by_arm for by_arm in rows.values())]
    head = [
        *("workload", "clients"),
        *(f"TTFT p50 ms, {TITLES[a]}" for a in arms),
        *(f"tokens/s, {TITLES[a]}" for a in arms),
    ]
    lines = [f"{describe(env)}", ""]
    lines += [_line(head), _line(["---", "---:", *["---:"] * (2 * len(arms))])]
    for (workload, clients), by_arm in rows.items():
        cols = [workload, str(clients)]
        cols += [_with_spread(by_arm.get(a), "ttft_p50_s", 1e3, 0) for a in arms]
        cols += [_with_spread(by_arm.get(a), "tok_s", 1.0, 1) for a in arms]
        lines.append(_line(cols))
    known = document["ratios"]
    if known:
        lines += [
            "",
            "Headrace divided by its peer (TTFT: below 1 is better; tokens/s: above 1):",
            "",
        ]
        kinds = [(m, p) for m in COMPARED for p in PEERS]
        kinds = [k for k in kinds if any(n.endswith(f".{k[0]}_vs_{k[1]}") for n in known)]
        titles = {"ttft_p50": "TTFT p50", "ttft_mean": "mean TTFT", "tok_s": "tokens/s"}
        lines.append(_line(["cell", *(f"{titles[m]} / {TITLES[p]}" for m, p in kinds)]))
        lines.append(_line(["---", *["---:"] * len(kinds)]))
        for workload, clients in rows:
            names = [f"{workload}.c{clients}.{m}_vs_{p}" for m, p in kinds]
            ratio_cols = [_ratio(known.get(n)) for n in names]
            lines.append(_line([f"`{workload}.c{clients}`", *ratio_cols]))
    errors = sum(row["errors"] for row in document["cells"])
    total = sum(row["requests"] for row in document["cells"])
    lines += ["", f"{total} requests, {errors} failed."]
    return "\n".join(lines) + "\n"


def describe(env: Mapping[str, Any]) -> str:
    """Return the line above a table: date, machine, versions, settings, order."""
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items() if v)
    each = ", ".join(f"{k}={v}" for k, v in env["engine"].items())
    decodes = env.get("decodes", 1)
    apart = (
        f"Ray's app and Headrace: 1 prefill and {decodes} decode engines. " if decodes > 1 else ""
    )
    return (
        f"{env['date']}, {env['cpu']}, {env['cores']} cores, {env['memory_gb']} GB; {versions}. "
        f"{apart}Each engine: 1 thread, {each}. {env['order']}. "
        "Medians of repeats (least to greatest)."
    )


def fill(text: str, name: str, content: str) -> str:
    """`text` with what stands between the markers of `name` replaced.

    Raises:
        ValueError: it does not hold both markers.
    """
    begin, end = BEGIN.format(name), END.format(name)
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"there is no {begin} followed by {end}")
    return f"{head}{begin}\n{content.strip()}\n{end}{tail}"


def write_markdown(path: Path, contents: Mapping[str, str]) -> None:
    """Fill those markers that a file has, or write a new file of the first content.

    Raises:
        ValueError: the file exists and has markers of none of the names.
    """
    if not path.exists():
        path.write_text(next(iter(contents.values())), "utf-8")
        return
    text = path.read_text("utf-8")
    here = [name for name in contents if BEGIN.format(name) in text]
    if not here:
        wanted = " or ".join(BEGIN.format(name) for name in contents)
        raise ValueError(f"there is no {wanted}")
    for name in here:
        text = fill(text, name, contents[name])
    path.write_text(text, "utf-8")


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Bars of TTFT (log scale) and tokens/s by cell and arm; whiskers: least and greatest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {(f"{r['workload']}\nc{r['concurrency']}", r["arm"]): r for r in document["cells"]}
    names = list(dict.fromkeys(cell for cell, _ in rows))
    arms = [a for a in TITLES if any(arm == a for _, arm in rows)]
    panels = (
        ("ttft_p50_s", "TTFT p50, s (less is better)"),
        ("tok_s", "tokens/s (more is better)"),
    )
    colors = {"vllm": "#9aa5b1", "vllm_x2": "#5b6773", "ray_pd": "#e0a458", "headrace": "#2a6f97"}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(arms)
    for axis, (measure, title) in zip(axes, panels, strict=True):
        for index, arm in enumerate(arms):
            at = [i + (index - (len(arms) - 1) / 2) * width for i in range(len(names))]
            known = [rows.get((n, arm), {}).get(measure, spread([])) for n in names]
            middle = [k["median"] for k in known]
            below = [max(0.0, k["median"] - k["min"]) for k in known]
            above = [max(0.0, k["max"] - k["median"]) for k in known]
            axis.bar(at, middle, width, label=TITLES[arm], color=colors[arm])
            axis.errorbar(at, middle, [below, above], fmt="none", ecolor="black", elinewidth=0.8)
        axis.set_xticks(range(len(names)), names)
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _line(columns: Iterable[str]) -> str:
    return "| " + " | ".join(columns) + " |"


def _with_spread(row: Mapping[str, Any] | None, measure: str, scale: float, digits: int) -> str:
    if row is None or math.isnan(row[measure]["median"]):
        return "-"
    known = {k: f"{scale * v:.{digits}f}" for k, v in row[measure].items()}
    if row["repeats"] == 1:
        return known["median"]
    return f"{known['median']} ({known['min']} to {known['max']})"


def _ratio(known: Mapping[str, float] | None) -> str:
    if known is None:
        return "-"
    middle, least, most = (f"{known[k]:.2f}" for k in ("median", "min", "max"))
    return middle if least == most else f"{middle} ({least} to {most})"

"""`headrace lab cross-layer convert`: a model that keeps less KV, made from one that keeps all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from headrace.cli.console import CliError, stderr, stdout

if TYPE_CHECKING:
    from headrace_lab.cross_layer.asymmetry import Nearest
    from headrace_lab.cross_layer.convert import Converter, ConvertKind, Point
    from headrace_lab.cross_layer.error import Error, Truth
    from headrace_lab.models.decoder import Decoder

REPORT, PLOT = "report.json", "report.png"
NO_PLOT = "No plot: it takes matplotlib; pip install 'headrace[lab]' brings it"
BEYOND = 4
"""The curve continues up to this many times the allowed increase of perplexity."""


@dataclass(frozen=True)
class ConvertOptions:
    """The command's options."""

    kind: ConvertKind
    perplexity: float
    readers: int | None
    distill: int
    texts: Path | None
    fit: int
    measure: int
    tokens: int


@dataclass(frozen=True)
class Job:
    """A model to convert, and texts in its tokens."""

    folder: Path
    model: Decoder
    converter: Converter
    truth: Truth
    distilling: Any


def convert(name: str, out: Path, asked: ConvertOptions) -> None:
    """Convert, write the model and the report, and print the curve.

    Raises:
        CliError: the model cannot be converted, the texts are too few, or no layer can lose its KV
            at this perplexity.
    """
    from headrace_lab.cross_layer import asymmetry
    from headrace_lab.cross_layer.distill import distill
    from headrace_lab.models import checkpoint

    if asked.kind not in ("fused", "lite"):
        raise CliError(f"--kind is {asked.kind}: write fused or lite", 2)
    print_timed = _clock()
    job = _prepare(name, asked)
    print_timed(f"perplexity {job.truth.perplexity:.3f} as it is")
    points = _curve(job, asked, print_timed)
    chosen = points[-1] if asked.readers else last_within(points, 1 + asked.perplexity)
    distilled = None
    if chosen is not None:
        made = job.converter.convert(chosen.cross_layer)
        if asked.distill:
            every = max(1, asked.distill // 10)

            def report(step: int, loss: float) -> None:
                if step % every == 0:
                    print_timed(f"distilled on {step} texts: KL {loss:.4f}")

            distill(made, job.model, list(job.distilling), report)
            distilled = job.truth.error(made, first=min(chosen.cross_layer.readers))
        checkpoint.write(out, job.converter.described(chosen.cross_layer), made, job.folder)
    nearest = asymmetry.nearest(job.converter.sums)
    out.mkdir(parents=True, exist_ok=True)
    found = report_of(job.truth.perplexity, points, chosen, distilled, nearest)
    (out / REPORT).write_text(json.dumps(found, indent=1))
    _plot(points, asked, out / PLOT)
    stdout().print(table(points))
    if chosen is None:
        raise CliError(
            f"without the KV of layer {points[0].layer} alone the perplexity is "
            f"{points[0].error.perplexity:.3f} times what it was: allow more with --perplexity, or "
            "train with --distill and --readers. No model was written"
        )
    stdout().print(verdict(chosen, distilled, out), markup=False, soft_wrap=True)


def last_within(points: Sequence[Point], limit: float) -> Point | None:
    """Return the last point, with the most KV saved, whose perplexity is within the limit."""
    within = [point for point in points if point.error.perplexity <= limit]
    return within[-1] if within else None


def verdict(chosen: Point, distilled: Error | None, out: Path) -> str:
    """Return the message about the written model and its error."""
    count, layers = len(chosen.cross_layer.readers), chosen.cross_layer.layers
    text = (
        f"{out}: {count} of {layers} layers keep no KV, {chosen.saved:.1%} of it is saved; "
        f"perplexity {chosen.error.perplexity:.3f} times, KL {chosen.error.kl:.4f}"
    )
    if distilled is not None:
        text += f"; distilled {distilled.perplexity:.3f} times, KL {distilled.kl:.4f}"
    return text


def table(points: Sequence[Point]) -> Table:
    """Return the curve as a table, one row for each layer."""
    found = Table("KV saved", "layer", "keys of", "values of", "perplexity, times", "KL")
    for point in points:
        cross_layer, layer = point.cross_layer, point.layer
        sources = (
            " + ".join(map(str, which(layer))) for which in (cross_layer.keys, cross_layer.values)
        )
        found.add_row(
            *(f"{point.saved:.1%}", str(layer), *sources),
            *(f"{point.error.perplexity:.3f}", f"{point.error.kl:.4f}"),
        )
    return found


def report_of(
    perplexity: float,
    points: Sequence[Point],
    chosen: Point | None,
    distilled: Error | None,
    nearest: Sequence[Nearest],
) -> dict[str, Any]:
    """Return all measurements, for JSON."""
    return {
        "perplexity": perplexity,
        "curve": [
            {
                "layer": point.layer,
                "kv_saved": point.saved,
                "kv_fusion": point.cross_layer.section(),
                **asdict(point.error),
            }
            for point in points
        ],
        "written": None if chosen is None else len(chosen.cross_layer.readers),
        "distilled": None if distilled is None else asdict(distilled),
        "nearest": [asdict(one) for one in nearest],
    }


def _prepare(name: str, asked: ConvertOptions) -> Job:
    """Read the model and cut the texts."""
    import torch
    from transformers import AutoTokenizer

    from headrace.model import ModelError, resolve
    from headrace_lab.cross_layer.convert import Converter
    from headrace_lab.cross_layer.error import Truth
    from headrace_lab.models import checkpoint
    from headrace_lab.texts.corpus import CorpusError, passages, sides
    from headrace_prefill.cross_layer.config import CrossLayerConfigError

    try:
        folder = Path(resolve(name))
        config, model = checkpoint.read(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)

        def cut(files: Sequence[Path], count: int) -> torch.Tensor:
            def encode(text: str) -> list[int]:
                found: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
                return found

            return torch.from_numpy(passages(encode, files, count, asked.tokens).astype("int64"))

        mine, others = sides(asked.texts)
        texts, measured = cut(mine, asked.fit + asked.distill), cut(others, asked.measure)
        converter = Converter(config, model, texts[: asked.fit])
    except (CorpusError, CrossLayerConfigError, ModelError) as error:
        raise CliError(f"{name}: {error}", 2) from None
    return Job(folder, model, converter, Truth(model, measured), texts[asked.fit :])


def _curve(job: Job, asked: ConvertOptions, print_timed: Callable[[str], None]) -> list[Point]:
    points: list[Point] = []
    most = asked.readers or job.converter.layers
    for point in job.converter.curve(asked.kind, job.truth, most):
        points.append(point)
        print_timed(
            f"{len(points)} layers without KV: perplexity {point.error.perplexity:.3f} times, "
            f"KL {point.error.kl:.4f}"
        )
        if asked.readers is None and point.error.perplexity > 1 + BEYOND * asked.perplexity:
            break
    return points


def _plot(points: Sequence[Point], asked: ConvertOptions, file: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        stderr().print(NO_PLOT, markup=False)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    saved = [100 * point.saved for point in points]
    axes.plot(saved, [p.error.perplexity for p in points], "o-", label="perplexity, times")
    axes.axhline(1 + asked.perplexity, color="grey", linewidth=0.8)
    axes.set(xlabel="KV saved, %", ylabel="perplexity, times")
    beside = axes.twinx()
    beside.plot(saved, [p.error.kl for p in points], "s--", color="C1")
    beside.set(ylabel="KL, nats (dashed)")
    figure.savefig(file, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


def _clock() -> Callable[[str], None]:
    begun = time.monotonic()

    def print_timed(text: str) -> None:
        stderr().print(f"{text}, {time.monotonic() - begun:.0f} s", markup=False)

    return print_timed

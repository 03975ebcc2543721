"""`headrace lab cross-layer train`: models of several kinds from scratch, at equal tokens."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, cast

from rich.table import Table

from headrace.cli.console import CliError, stderr, stdout
from headrace_lab.cli.cross_layer.convert import NO_PLOT

if TYPE_CHECKING:
    from headrace_lab.cross_layer.train import Losses
    from headrace_prefill.cross_layer.config import Kind

DRAWN_WINDOWS = 8
"""Number of validation windows on which the readers' sources are compared."""


def train(
    out: Path,
    *,
    texts: Path | None,
    kinds: list[str] | None,
    seeds: list[int] | None,
    tokens: int,
    config: Path | None,
    storage_layers: int | None,
    context: int,
    batch: int,
    learning_rate: float,
    bfloat16: bool,
) -> None:
    """Train the runs that are missing in the folder, and print the losses of all its runs.

    Raises:
        CliError: an option is wrong, there is too little text, or the folder holds other runs.
    """
    from headrace_lab.cross_layer.comparison import (
        PLOT,
        SMALL,
        Comparison,
        SettingsError,
        compare,
        plot,
    )
    from headrace_lab.cross_layer.train import Recipe
    from headrace_lab.texts.corpus import CorpusError
    from headrace_prefill.cross_layer.config import KINDS, CrossLayerConfig, CrossLayerConfigError

    if unknown := sorted(set(kinds or ()) - set(KINDS)):
        raise CliError(f"--kind {unknown[0]} is not one of {', '.join(KINDS)}", 2)
    recipe = Recipe(tokens, context, batch, learning_rate, bfloat16)
    if not recipe.steps:
        raise CliError(f"--tokens {tokens} is less than a step's {recipe.step_tokens}", 2)
    shape = SMALL if config is None else _read(config)
    stored = storage_layers or shape["num_hidden_layers"] // 2
    chosen = cast("tuple[Kind, ...]", tuple(kinds or KINDS))
    asked = Comparison(shape, stored, chosen, tuple(seeds or (0, 1)), recipe, texts)

    def report(name: str, found: Losses) -> None:
        seen, loss = found.valid[-1]
        spent = f"{found.compute_s:.0f} s, {seen / max(found.compute_s, 1e-9):.0f} tokens/s"
        stderr().print(f"{name}: {seen} tokens, loss {loss:.4f}, {spent}", markup=False)

    try:
        for one in chosen:
            CrossLayerConfig.of(asked.described(one))
        losses = compare(asked, out, report=report)
    except (CorpusError, CrossLayerConfigError, SettingsError) as error:
        raise CliError(str(error), 2) from None
    stdout().print(table(losses))
    _print_drawn(out, losses)
    try:
        plot(losses, out / PLOT)
    except ImportError:
        stderr().print(NO_PLOT, markup=False)


def table(losses: dict[str, Losses]) -> Table:
    """Return a table of final losses by kind: mean, spread, and difference from vanilla's with the
    same seed."""
    found = Table("kind", "parameters", "seeds", "loss", "highest - lowest", "above vanilla")
    for kind in dict.fromkeys(name.rsplit("-")[0] for name in losses):
        runs = {
            name.rsplit("-")[1]: one
            for name, one in losses.items()
            if name.startswith(f"{kind}-") and one.final is not None
        }
        if not runs:
            continue
        finals = {seed: one.final or 0.0 for seed, one in runs.items()}
        apart = [
            f"{final - base.final:+.4f}"
            for seed, final in finals.items()
            if (base := losses.get(f"vanilla-{seed}")) and base.final is not None
        ]
        parameters = next(iter(runs.values())).parameters
        spread = max(finals.values()) - min(finals.values())
        found.add_row(
            *(kind, f"{parameters:,}", str(len(runs)), f"{mean(finals.values()):.4f}"),
            *(f"{spread:.4f}", ", ".join(apart)),
        )
    return found


def _print_drawn(out: Path, losses: dict[str, Losses]) -> None:
    """Print how much the readers of each trained `fused` model draw from their lower layer."""
    from headrace_lab.cross_layer.asymmetry import learned
    from headrace_lab.cross_layer.comparison import validation
    from headrace_lab.models.checkpoint import WEIGHTS, read

    for name, found in losses.items():
        trained = (out / name / WEIGHTS).exists()
        if not name.startswith("fused-") or found.final is None or not trained:
            continue
        _, model = read(out / name)
        drawn = learned(model, validation(out, DRAWN_WINDOWS))
        shown = Table("layer", "keys from the lower layer", "values from the lower layer")
        for layer, (keys, values) in drawn.items():
            shown.add_row(str(layer), f"{keys:.0%}", f"{values:.0%}")
        stdout().print(f"{name}, of the energy:", markup=False)
        stdout().print(shown)


def _read(config: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(config.read_text()))
    except (OSError, ValueError) as error:
        raise CliError(f"{config} cannot be read: {error}", 2) from None

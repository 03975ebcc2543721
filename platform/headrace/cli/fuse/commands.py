"""The commands `headrace fuse ...` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

fuse_app = typer.Typer(
    help="Make models that keep less KV: see docs/fusion.md.", no_args_is_help=True
)


@fuse_app.command("train")
def fuse_train(
    out: Annotated[Path, typer.Argument(help="Folder for checkpoints, models and losses.")],
    texts: Annotated[
        Path | None, typer.Option(help="Folder of texts. Default: installed packages'.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="vanilla, cla, yoco, lite or fused. Can be repeated. Default: all."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="To train each run on.")] = 5_000_000,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json with the models' sizes. Default: 6 million parameters."),
    ] = None,
    storage_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers that keep KV. Default: half.")
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a training window.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Windows of a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="At its highest.")] = 2e-3,
    bfloat16: Annotated[
        bool,
        typer.Option(help="Multiply in bfloat16, for CPUs that have it. Weights stay float32."),
    ] = False,
) -> None:
    """Train models from scratch, and compare their losses.

    A call with the same folder goes on where the one before ended, however that ended."""
    from headrace.cli.fuse import train as command

    command.train(
        out,
        texts=texts,
        kinds=kind,
        seeds=seeds,
        tokens=tokens,
        config=config,
        storage_layers=storage_layers,
        context=context,
        batch=batch,
        learning_rate=learning_rate,
        bfloat16=bfloat16,
    )

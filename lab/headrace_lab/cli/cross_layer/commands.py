"""The commands `headrace lab cross-layer ...` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from headrace_lab.cross_layer.convert import ConvertKind

cross_layer_app = typer.Typer(
    help="Make models that keep less KV: see docs/cross-layer.md.", no_args_is_help=True
)


@cross_layer_app.command("train")
def train(
    out: Annotated[Path, typer.Argument(help="Folder for checkpoints, models and losses.")],
    texts: Annotated[
        Path | None, typer.Option(help="Folder of texts. Default: installed packages'.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="vanilla, cla, yoco, lite or fused. Can be repeated. Default: all."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Of a run of each kind. Can be repeated. Default: 0 and 1."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="To train each run on.")] = 5_000_000,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json with the models' sizes. Default: 5 million parameters."),
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

    A call with the same folder continues where the one before ended, however that ended. Several
    may run at once; each takes models that no other trains."""
    from headrace_lab.cli.cross_layer import train as command

    command.train(
        out,
        texts=texts,
        kinds=kind,
        seeds=seed,
        tokens=tokens,
        config=config,
        storage_layers=storage_layers,
        context=context,
        batch=batch,
        learning_rate=learning_rate,
        bfloat16=bfloat16,
    )


@cross_layer_app.command("convert")
def convert(
    model: Annotated[
        str, typer.Argument(help="Name from headrace model list, folder, or Hugging Face id.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the converted model; made.")],
    kind: Annotated[str, typer.Option(help="fused or lite.")] = "fused",
    perplexity: Annotated[
        float, typer.Option(min=0.0, help="How much higher it may become: 0.05 is 5 %.")
    ] = 0.05,
    readers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers that lose their KV, whatever the perplexity."),
    ] = None,
    distill: Annotated[
        int, typer.Option(min=0, help="Texts to train those layers on, after the fit.")
    ] = 0,
    texts: Annotated[
        Path | None, typer.Option(help="Folder of texts. Default: installed packages'.")
    ] = None,
    fit: Annotated[
        int, typer.Option(min=3, help="Texts to fit on; on two, layers are chosen.")
    ] = 10,
    measure: Annotated[int, typer.Option(min=1, help="Other texts to measure on.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Of a text.")] = 512,
) -> None:
    """Make a model keep less KV, and say what that costs.

    Layers lose their KV one after another, those first that cost least, until the perplexity is too
    high. The model before that is written to OUT, with report.json and report.png. It takes
    minutes, and 12 bytes of memory a parameter."""
    from headrace_lab.cli.cross_layer import convert as command

    command.convert(
        model,
        out,
        command.ConvertOptions(
            cast("ConvertKind", kind), perplexity, readers, distill, texts, fit, measure, tokens
        ),
    )

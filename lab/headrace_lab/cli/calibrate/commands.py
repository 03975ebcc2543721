"""The commands `headrace lab calibrate ...` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.console import CliError

calibrate_app = typer.Typer(
    help="Measure the error of lossy techniques on a model, and choose their ratios.",
    no_args_is_help=True,
)

ModelArgument = Annotated[
    str | None, typer.Argument(help="Name from headrace model list, folder, or Hugging Face id.")
]
TextsOption = Annotated[
    Path | None,
    typer.Option(help="Folder of texts like your documents. Default: installed packages'."),
]
PageOption = Annotated[int, typer.Option(help="As techniques.sparse.page_tokens: 16 or 32.")]
TargetOption = Annotated[
    float, typer.Option(min=0.0, help="Mean KL to the exact model that you allow, nats.")
]


@calibrate_app.command("blending")
def calibrate_blending(
    model: ModelArgument = None,
    texts: TextsOption = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to measure.")] = 12,
    tokens: Annotated[int, typer.Option(min=500, help="Length of a prompt, about.")] = 2000,
    target_kl: TargetOption = 0.02,
    output: Annotated[
        Path | None, typer.Option(help="Also write the measurements to this file, as JSON.")
    ] = None,
) -> None:
    """Print the recompute ratio at which blending stays within an error. It takes minutes, and 4
    bytes of memory a parameter."""
    from headrace_lab.cli.calibrate import blending as command

    command.calibrate(
        model, texts=texts, prompts=prompts, tokens=tokens, target_kl=target_kl, output=output
    )


@calibrate_app.command("compression")
def calibrate_compression(
    model: ModelArgument = None,
    texts: TextsOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write, for techniques.compression.calibration. Default: "
            "NAME.compression.safetensors, here.",
        ),
    ] = None,
    page_tokens: PageOption = 32,
    tokens: Annotated[int, typer.Option(min=600, help="Length of a text.")] = 3000,
    learn: Annotated[int, typer.Option(min=1, help="How many texts to learn from.")] = 10,
    measure: Annotated[int, typer.Option(min=1, help="How many others to measure on.")] = 3,
) -> None:
    """Write the file with which compression need not read prompts a second time. It takes a quarter
    of an hour, and 4 bytes of memory a parameter."""
    from headrace_lab.cli.calibrate import compression as command

    _check_pages(page_tokens)
    command.calibrate(
        model,
        texts=texts,
        learn=learn,
        measure=measure,
        tokens=tokens,
        page_tokens=page_tokens,
        output=output,
    )


@calibrate_app.command("sparse")
def calibrate_sparse(
    model: ModelArgument = None,
    texts: TextsOption = None,
    target_kl: TargetOption = 0.02,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write, for techniques.sparse.calibration. Default: "
            "NAME.sparse.safetensors, here.",
        ),
    ] = None,
    page_tokens: PageOption = 32,
    tokens: Annotated[int, typer.Option(min=2500, help="Length of a text.")] = 4096,
    learn: Annotated[int, typer.Option(min=1, help="How many texts to learn from.")] = 3,
    measure: Annotated[int, typer.Option(min=1, help="How many others to measure on.")] = 3,
) -> None:
    """Write the file with which sparse attention stays within an error. It takes minutes, and 4
    bytes of memory a parameter."""
    from headrace_lab.cli.calibrate import sparse as command

    _check_pages(page_tokens)
    command.calibrate(
        model,
        texts=texts,
        learn=learn,
        measure=measure,
        tokens=tokens,
        page_tokens=page_tokens,
        target_kl=target_kl,
        output=output,
    )


def _check_pages(tokens: int) -> None:
    if tokens not in (16, 32):
        raise CliError(f"--page-tokens is {tokens}, must be 16 or 32", 2)

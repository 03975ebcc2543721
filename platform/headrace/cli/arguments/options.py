"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import completion

NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of the instance. Needed only if several are running. HEADRACE_URL in the "
        "environment names an app elsewhere instead.",
        autocompletion=completion.instances,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
FileOption = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="Configuration file (YAML). See docs/configuration.md."),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Preset to start from: laptop (the default), gpu-node or gpu-cluster. Wins over "
        "preset: in the file.",
        autocompletion=completion.presets,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override one field, for example gateway.port=8001. Can be repeated.",
        autocompletion=completion.fields,
    ),
]
KnownModelArgument = Annotated[
    str,
    typer.Argument(help="Name from headrace model list.", autocompletion=completion.models),
]

"""`headrace config init`: a commented file with the fields that people set first.

The comments are the schema's own descriptions, and the values are the preset's, so the file means
the same as the preset until a line is changed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from headrace.cli.console import CliError
from headrace.config import HeadraceConfig, preset_names
from headrace.config.load import parse_yaml, preset_text

FIELDS = {
    "model": ("id", "source", "max_model_len"),
    "prefill": ("replicas", "engine"),
    "decode": ("replicas", "engine"),
    "gateway": ("host", "port", "api_keys_file"),
    "store": ("dram_gb", "nvme_folder"),
}
"""The fields, by section."""
WIDTH = 96


def starter(preset: str) -> str:
    """Return the file's text for a preset. Raises ConfigError if there is no such preset."""
    values = parse_yaml(preset_text(preset), f"preset {preset}")
    config = HeadraceConfig.model_validate(values)  # without the fields of the site
    lines = [
        "# Configuration of Headrace: headrace up -f THIS_FILE",
        "# Check it with headrace config check -f THIS_FILE; docs/configuration.md has all fields.",
        "# A line such as `#source:` sets nothing; to set it, remove the # and write a value.",
        "",
        f"# Values that are not set here come from the preset: {', '.join(preset_names())}.",
        f"preset: {preset}",
    ]
    for section, names in FIELDS.items():
        lines += ["", f"{section}:", *_section(getattr(config, section), names)]
    return "\n".join(lines) + "\n"


def _section(values: Any, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        description = type(values).model_fields[name].description or ""
        for line in textwrap.wrap(description, WIDTH - 4):
            yield f"  # {line}"
        value = getattr(values, name)
        text = yaml.safe_dump({name: value}, allow_unicode=True).strip()
        yield f"  #{name}:" if value is None else textwrap.indent(text, "  ")


def write(file: Path, preset: str, *, force: bool) -> None:
    """Write the file.

    Raises:
        CliError: it exists and `force` is not set, or it cannot be written.
    """
    text = starter(preset)
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise CliError(f"{file} exists; --force replaces it", 2) from None
    except OSError as error:
        raise CliError(f"{file} cannot be written: {error.strerror or error}") from None

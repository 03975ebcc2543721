"""`headrace config`: writes, checks, compares and prints configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.arguments.options import FileOption, JsonOption, PresetOption, SetOption
from headrace.cli.console import stderr, stdout
from headrace.config import ConfigError, HeadraceConfig

SECRET = "***"

config_app = typer.Typer(
    help="Write, check, compare and print configurations.", no_args_is_help=True
)


@config_app.command("init")
def config_init(
    file: Annotated[str, typer.Argument(help="File to write; - for stdout.")] = "headrace.yaml",
    preset: PresetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented configuration with the fields that people set first."""
    from headrace.cli.configure import starter

    chosen = preset or "laptop"
    if file == "-":
        sys.stdout.write(starter.starter(chosen))
        return
    starter.write(Path(file), chosen, force=force)
    stdout().print(f"wrote {file}; start it with: headrace up -f {file}", markup=False)
    try:
        load(Path(file), None, None, None)
    except ConfigError as error:
        for line in error.problems:
            stderr().print(f"before that: {line}", markup=False)


@config_app.command("diff")
def config_diff(
    file: FileOption = None,
    preset: PresetOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the fields that differ from the defaults; keys are masked."""
    from headrace.cli.configure.difference import differences

    found = differences(_masked(load(file, preset, overrides, None)))
    if as_json:
        print(json.dumps({d.field: {"value": d.value, "default": d.default} for d in found}))
        return
    for each in found:
        value, default = (json.dumps(one, ensure_ascii=False) for one in each[1:])
        stdout().print(f"{each.field}: {value}  (default: {default})", markup=False)
    if not found:
        stdout().print("no field differs from the defaults")


@config_app.command("show")
def config_show(
    file: FileOption = None, preset: PresetOption = None, overrides: SetOption = None
) -> None:
    """Print the whole configuration, with preset and defaults merged; keys are masked."""
    import yaml

    data = _masked(load(file, preset, overrides, None))
    order = ["model", "prefill", "decode", "gateway", "router"]
    data = {k: data[k] for k in [*order, *(k for k in data if k not in order)]}
    sys.stdout.write(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


@config_app.command("check")
def config_check(
    file: FileOption = None,
    preset: PresetOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a configuration without starting anything."""
    from headrace.config import warnings

    try:
        found = warnings(load(file, preset, overrides, None))
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "errors": error.problems, "warnings": []}, indent=2))
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps({"ok": True, "errors": [], "warnings": found}, indent=2))
        return
    for line in found:
        stderr().print(f"warning: {line}", markup=False)
    checked = file or (f"the preset {preset}" if preset else None)
    checked = checked or ("the configuration" if overrides else "the default configuration")
    stdout().print(f"{checked}: no mistakes found", markup=False)


def _masked(config: HeadraceConfig) -> dict[str, Any]:
    """Return a configuration as plain data, without its secrets."""
    data = config.model_dump()
    data["gateway"]["api_keys"] = [SECRET for _ in data["gateway"]["api_keys"]]
    data["store"]["object_options"] = {name: SECRET for name in data["store"]["object_options"]}
    if "secret" in data["store"]["node"]:
        data["store"]["node"]["secret"] = SECRET
    return data


def load(
    file: Path | None, preset: str | None, overrides: list[str] | None, address: str | None
) -> HeadraceConfig:
    """Return the checked configuration. Raises ConfigError if it has mistakes.

    Args:
        address: of the Ray cluster to join; None for the configuration's.
    """
    from headrace.config import load_config

    extra: list[Any] = list(overrides or [])
    if address is not None:
        extra.append(f"ray.address={json.dumps(address)}")
    return load_config(file, preset, extra)

"""The commands and their options. The module of the same name carries out each command.

The groups `model`, `corpus`, `store` and `keys` are in `groups`. Other packages add groups by entry
points of the group `headrace.commands`, each a `typer.Typer`; `headrace_lab` adds `lab`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.arguments.options import (
    FileOption,
    JsonOption,
    NameOption,
    PresetOption,
    SetOption,
)
from headrace.cli.arguments.parser import describe_usage_error, parser_of, unwrap_help
from headrace.cli.configure.commands import config_app, load
from headrace.cli.console import CliError, stderr, stdout
from headrace.cli.doctor import doctor
from headrace.cli.groups import corpus_app, keys_app, model_app, store_app
from headrace.config import ConfigError

if TYPE_CHECKING:
    from headrace.cli.state import Instance

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The error of a command line that cannot be parsed, which Typer does not export."""
RUN, LOOK, MODELS = "Run", "Look", "Models and KV"
CONFIGURE, MORE = "Configure", "Other packages"
"""Groups of commands in the help."""

app = typer.Typer(
    name="headrace",
    help="Serve an LLM with separate prefill and decode engines (vLLM) on Ray, behind one "
    "OpenAI-compatible endpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(model_app, name="model", rich_help_panel=MODELS)
app.add_typer(store_app, name="store", rich_help_panel=MODELS)
app.add_typer(corpus_app, name="corpus", rich_help_panel=MODELS)
app.add_typer(config_app, name="config", rich_help_panel=CONFIGURE)
app.add_typer(keys_app, name="keys", rich_help_panel=CONFIGURE)


def _add_commands(points: Iterable[EntryPoint]) -> None:
    """Add the groups of other packages. One that cannot be loaded costs a warning only."""
    for point in points:
        try:
            group = point.load()
            if not isinstance(group, typer.Typer):
                raise TypeError(f"{point.value} is no typer.Typer")
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            line = f"warning: the command {point.name} of {point.value} cannot be loaded: {why}"
            stderr().print(line, markup=False)
        else:
            app.add_typer(group, name=point.name, rich_help_panel=MORE)


_add_commands(entry_points(group="headrace.commands"))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. The exit status is 0, 1 for a failure, or 2 for a wrong request."""
    debug = os.environ.get("HEADRACE_DEBUG") == "1"
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--debug" in arguments:
        debug = True
        arguments = [a for a in arguments if a != "--debug"]
    parser = parser_of(app)
    try:
        sys.exit(parser.main(arguments, prog_name="headrace", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except UsageError as error:
        if str(error):  # else a group without a command, whose help has been printed
            stderr().print(f"error: {describe_usage_error(error, parser)}", markup=False)
        sys.exit(2)
    except Exception as error:
        if debug:
            raise
        _complain(error)
        code = error.exit_code if isinstance(error, CliError) else 1
        sys.exit(2 if isinstance(error, ConfigError) else code)


def _complain(error: Exception) -> None:
    say = stderr()
    if isinstance(error, ConfigError):
        for line in error.problems:
            say.print(f"error: {line}", markup=False)
        return
    text = str(error) or type(error).__name__
    if not isinstance(error, CliError):
        text = " ".join(text.split())
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    say.print(f"error: {text}", markup=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit()


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the versions and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Declares --debug for the help; `main` has removed it from the arguments."""


@app.command(rich_help_panel=RUN)
def up(
    file: FileOption = None,
    preset: PresetOption = None,
    overrides: SetOption = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", "-d", help="Return when the endpoint is ready, and leave it running."
        ),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="Join the Ray cluster at this address (host:port or auto) instead of starting Ray."
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(help="Name of this instance; running instances need different names.")
    ] = "default",
    timeout: Annotated[
        float, typer.Option(help="Seconds it may take to become ready; then it is stopped.")
    ] = 900.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --detach: print JSON on stdout.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also print what the start spent its time on."),
    ] = False,
) -> None:
    """Start Ray, the engines and the endpoint, and serve until stopped.

    Ctrl-C stops it, and so does the end of the shell or program that started it, unless --detach
    or nohup is used.
    """
    if as_json and not detach:
        raise CliError("--json needs --detach: without it, the command does not end", 2)
    config = load(file, preset, overrides, address)
    from headrace.cli import up as command

    command.up(
        config,
        name=name,
        detach=detach,
        timeout_s=timeout,
        as_json=as_json,
        verbose=verbose,
    )


@app.command(rich_help_panel=RUN)
def down(
    name: NameOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop all instances.")] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Do not contact the Ray cluster that the instance joined; only remove the "
            "instance's record. For clusters that no longer exist.",
        ),
    ] = False,
    now: Annotated[
        bool,
        typer.Option("--now", help="End requests in flight at once, as Ctrl-C does later."),
    ] = False,
) -> None:
    """Stop an instance.

    It takes no new requests; those in flight may end, within drain_s seconds. Then the instance's
    processes, its Ray node, its folder and its files in /dev/shm are removed. On a Ray cluster
    joined with --address, only the Serve application is deleted.
    """
    from headrace.cli import down as command

    def stop(instance: Instance, *, drain: bool) -> None:
        say = stderr().print
        command.stop(instance, lambda line: say(f"  {line}"), drain=drain, forget=forget)

    failed = []
    for instance in _to_stop(name, everything):
        try:
            try:
                stop(instance, drain=not now)
            except KeyboardInterrupt:
                if not instance.own_node:
                    raise
                stop(instance, drain=False)
            stdout().print(f'"{instance.name}" is down')
        except CliError as error:
            failed.append(str(error))
    if failed:
        raise CliError("\nerror: ".join(failed))


def _to_stop(name: str | None, everything: bool) -> list[Instance]:
    from headrace.cli import state

    if name is not None and not everything:
        try:
            one = state.load(name)
        except ValueError as error:
            raise CliError(str(error), 2) from None
        found = [one] if one else []
    else:
        found = list(state.instances())
    if len(found) > 1 and not everything:
        names = ", ".join(i.name for i in found)
        raise CliError(
            f"several instances are running ({names}); choose one with --name, or use --all", 2
        )
    if not found:
        stdout().print(f'no instance called "{name}" is running' if name else "nothing is running")
    return found


@app.command(rich_help_panel=LOOK)
def status(
    name: NameOption = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also show steps, transfers and fitted cost models."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the app's health, its replicas, the KV store's tiers and advice."""
    from headrace.cli.show import status as command

    command.status(name, as_json=as_json, verbose=verbose)


@app.command(rich_help_panel=LOOK)
def top(
    name: NameOption = None,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show rates, times, replicas and requests, live.

    Keys: q quits, s sorts the requests, p pauses. With --json, print a document a line at each
    update.
    """
    from headrace.cli.show import top as command

    command.top(name, every_s=every, once=once, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            help="The request's id: x-request-id of its answer. Without it, the recent requests "
            "are listed.",
            metavar="REQUEST",
            show_default=False,
        ),
    ] = None,
    last: Annotated[
        bool, typer.Option("--last", help="Explain the newest request that has a plan.")
    ] = False,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show why a request was served where it was: predicted and measured times.

    Without a request, list the recent ones.
    """
    from headrace.cli.show import explain as command

    command.explain(request_id, name, last=last, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def usage(
    tenant: Annotated[
        str | None, typer.Option(help="Only this tenant. Default: all that the key may see.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    since: Annotated[
        str,
        typer.Option(
            help="Begin: a time before now such as 24h or 7d, or a time (UTC) such as 2026-11-01. "
            "The whole hour counts."
        ),
    ] = "24h",
    until: Annotated[
        str | None, typer.Option(help="End, in the same way. Default: now.", show_default=False)
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout.")] = False,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what requests cost, by tenant and model: tokens and engine seconds."""
    if as_csv and as_json:
        raise CliError("--csv and --json exclude each other", 2)
    from headrace.cli.show import usage as command

    wanted = {"tenant": tenant, "model": model, "since": since, "until": until}
    command.usage(name, wanted, as_csv=as_csv, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def chat(
    message: Annotated[
        str | None, typer.Argument(help="Question to ask. Without it, a conversation starts.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for. Default: the instance's model.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum length of an answer, in tokens.")] = 1024,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Randomness of the answer; 0 takes the likeliest tokens.")
    ] = 0.0,
    name: NameOption = None,
) -> None:
    """Chat with the running model, or ask it one question."""
    from headrace.cli import chat as command

    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    command.chat(name, model, system, message, sampling)


@app.command(rich_help_panel=RUN)
def demo(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before each step.")] = False,
    name: NameOption = None,
) -> None:
    """Show on the running app, in five steps, what it does. One step kills a replica."""
    from headrace.cli.show import demo as command

    command.demo(name, ask=not yes)


app.command(rich_help_panel=RUN)(doctor)


@app.command(rich_help_panel=CONFIGURE)
def chart() -> None:
    """Print the folder of the Helm chart: helm install NAME "$(headrace chart)"."""
    from headrace.chart_folder import chart_folder

    try:
        print(chart_folder())
    except FileNotFoundError as error:
        raise CliError(str(error)) from None


@app.command(rich_help_panel=RUN)
def version(as_json: JsonOption = False) -> None:
    """Print the versions of Headrace, Ray, vLLM and NIXL."""
    from headrace import __version__
    from headrace.cli import probes

    versions = {"headrace": __version__, **probes.package_versions()}
    if as_json:
        print(json.dumps(versions))
    else:
        words = ", ".join(f"{k} {v or 'missing'}" for k, v in versions.items() if k != "headrace")
        stdout().print(f"headrace {__version__} ({words})")


unwrap_help(app)

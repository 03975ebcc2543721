"""Makes the command line's parser from the declared commands, and words its errors.

Errors have one shape, as all errors of Headrace: `error: what is wrong; what would be right`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import typer
from typer.main import get_command

OTHER_WORDS = {
    "serve": "up",
    "start": "up",
    "run": "up",
    "stop": "down",
    "delete": "down",
    "ps": "status",
    "validate": "config check",
    "lint": "config check",
}
"""Words for commands in other programs, and ours."""
UNKNOWN = re.compile(r"No such command '([^']*)'")


def unwrap_help(app: typer.Typer) -> None:
    """Join the lines of each paragraph of the commands' docstrings, so that a terminal breaks them
    where its own width ends."""
    for command in app.registered_commands:
        text = inspect.cleandoc(command.help or inspect.getdoc(command.callback) or "")
        command.help = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            unwrap_help(group.typer_instance)


def parser_of(app: typer.Typer) -> Any:
    """Return the parser of all commands; the help of a flag names no type."""
    parser = get_command(app)
    for command, path in commands(parser):
        context = typer.Context(command, info_name=path, help_option_names=["-h", "--help"])
        for parameter in command.get_params(context):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return parser


def commands(parser: Any, path: str = "headrace") -> Iterator[tuple[Any, str]]:
    """Yield a command and all commands below it, with the words that call each."""
    yield parser, path
    for name, command in getattr(parser, "commands", {}).items():
        yield from commands(command, f"{path} {name}")


def describe_usage_error(error: Any, parser: Any) -> str:
    """Return the text of a usage error, with the nearest right word and the help to read."""
    message = " ".join(error.format_message().split())
    if (unknown := UNKNOWN.match(message)) and (hint := _suggest(unknown[1], error, parser)):
        return f"there is no command {unknown[1]!r}; did you mean {hint}?"
    message = message.replace("Input should be", "must be")
    message = re.sub(r", unable to parse.*", "", message)
    message = message.replace(" Did you mean", "; did you mean").replace(".;", ";").rstrip(".")
    text = message[:1].lower() + message[1:]
    context = error.ctx
    return f"{text}; see {context.command_path} -h" if context is not None else text


def _suggest(word: str, error: Any, parser: Any) -> str | None:
    """Return the command that a word was meant for: what other programs call so, else one of the
    same name in another group, else the nearest one of this group."""
    if word in OTHER_WORDS:
        return f"headrace {OTHER_WORDS[word]}"
    paths = [path for _, path in commands(parser)]
    if same := [path for path in paths if path.split()[-1] == word]:
        return same[0]
    group = error.ctx.command_path
    names = list(getattr(error.ctx.command, "commands", {}))
    near = get_close_matches(word, names, n=1)
    return f"{group} {near[0]}" if near else None

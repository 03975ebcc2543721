"""An instance of the app, as the benchmarks start and stop it with the CLI."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.cli.state import Instance, load

START_TIMEOUT_S = 480.0


def _headrace(*arguments: str, check: bool = True) -> None:
    """Run the CLI. Raises RuntimeError with its last words if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    if check and done.returncode != 0:
        text = done.stdout.decode("utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"headrace {arguments[0]} ended with {done.returncode}: {text}")


@contextmanager
def running_instance(
    prefix: str, settings: Sequence[str] = (), model: str | None = None, file: Path | None = None
) -> Iterator[Instance]:
    """Run an instance on a free port, with a state folder of its own, until the block ends.

    Args:
        prefix: beginning of its name.
        settings: KEY=VALUE each, as `headrace up --set` takes them; a later one wins.
        model: the model's folder; None for the default model.
        file: its configuration; None for the defaults.

    Raises:
        RuntimeError: it does not start.
    """
    chosen = ["gateway.port=0", *settings]
    if model is not None:
        chosen.insert(0, f"model.source={json.dumps(model)}")
    options = [part for each in chosen for part in ("--set", each)]
    options += ["-f", str(file)] if file else []
    name = f"{prefix}-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="hrb-", dir="/tmp") as folder:
        os.environ["HEADRACE_STATE"] = folder
        try:
            _headrace("up", "--detach", "--name", name, *options)
            instance = load(name)
            if instance is None:
                raise RuntimeError("headrace up left no state file")
            yield instance
        finally:
            _headrace("down", "--name", name, check=False)
            del os.environ["HEADRACE_STATE"]

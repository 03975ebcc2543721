"""An instance of the app, as the benchmarks start and stop it with the CLI."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.cli.state import Instance, load

START_TIMEOUT_S = 480.0


def headrace(*arguments: str, check: bool = True) -> None:
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
def running_instance(prefix: str, model: str, settings: Sequence[str]) -> Iterator[Instance]:
    """Run an instance on a free port, with a state folder of its own, until the block ends.

    Args:
        prefix: beginning of its name.
        model: the model's folder.
        settings: KEY=VALUE each, as `headrace up --set` takes them.

    Raises:
        RuntimeError: it does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="hrb-", dir="/tmp"))
    os.environ["HEADRACE_STATE"] = str(folder / "state")
    name = f"{prefix}-{secrets.token_hex(3)}"
    chosen = {
        "gateway.port": "0",
        "model.source": json.dumps(model),
        **dict(each.split("=", 1) for each in settings),
    }
    options = [part for k, v in chosen.items() for part in ("--set", f"{k}={v}")]
    try:
        headrace("up", "--detach", "--name", name, *options)
        instance = load(name)
        if instance is None:
            raise RuntimeError("headrace up left no state file")
        yield instance
    finally:
        headrace("down", "--name", name, check=False)
        shutil.rmtree(folder, ignore_errors=True)

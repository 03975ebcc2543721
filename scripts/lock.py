"""Resolve pyproject.toml into requirements/*.lock. `make lock` runs this inside the environment.

The locks name versions only, no index and no host, so that any mirror serves. The CPU build of
torch must be where pip looks (PIP_FIND_LINKS or an index).
"""

import os
import subprocess
import sys
from pathlib import Path

from install import pip_settings, uv_arguments, uv_environment  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent
OVERRIDES = ("--override", "requirements/cpu-overrides.txt")
# dev first: the runtime lock is cut from it, so that tests run on what is deployed.
LOCKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "dev",
        (*OVERRIDES, "--extra", "cpu", "--extra", "object", "--extra", "otlp", "--extra", "dev"),
    ),
    (
        "cpu",
        (
            *OVERRIDES,
            "--extra",
            "cpu",
            "--extra",
            "object",
            "--extra",
            "otlp",
            "--no-annotate",
            "-c",
            "requirements/dev.lock",
        ),
    ),
    ("gpu", ("--extra", "gpu", "--extra", "object", "--extra", "otlp")),
)


def main() -> None:
    python = Path(sys.executable)
    pip = pip_settings(python)
    environment = uv_environment(pip, os.environ)
    for name, words in LOCKS:
        print(f"requirements/{name}.lock", flush=True)
        command = [
            str(python.parent / "uv"),
            "pip",
            "compile",
            "--universal",
            "--python-version",
            "3.11",
        ]
        command += ["--no-header", "--quiet", *uv_arguments(pip, os.environ), *words, *sys.argv[1:]]
        command += ["pyproject.toml", "-o", f"requirements/{name}.lock"]
        done = subprocess.run(command, cwd=ROOT, env=environment)
        if done.returncode != 0:
            sys.exit(f"error: requirements/{name}.lock could not be resolved, for the reason above")


if __name__ == "__main__":
    main()

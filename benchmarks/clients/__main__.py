"""Whether Python clients work against Headrace in the modes that they have by default.

    python -m benchmarks.clients [--url URL] [--json FILE]

Makes an environment for each set of clients that can be installed together (`build/clients`, a
minute each), starts the laptop's app unless a URL is given, and runs `calls.py` in each of them.
Prints a line a call; ends with 1 if one failed. The clients are not dependencies of Headrace: their
versions contradict one another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from contextlib import ExitStack
from pathlib import Path

from benchmarks.instance import running_instance

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "clients"
LIMIT_S = 600
ENVIRONMENTS = {
    "openai": ("openai==3.57.0", "anthropic==2.14.0", "langchain-openai==1.7.4"),
    "agents": ("openai-agents==0.24.0", "pydantic-ai-slim[openai]==2.68.0"),
    "instructor": ("instructor==1.17.0",),
    "litellm": ("litellm==1.110.2",),
}
"""Clients by environment; the versions are those of November 27th, 2026."""


def main() -> int:
    """Run all; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", help="of a running app; without it one is started")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", nargs="*", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    asked = parser.parse_args()
    pythons = {name: environment(name) for name in asked.only}
    with ExitStack() as stack:
        url = asked.url or stack.enter_context(running_instance("clients")).endpoint
        results = {name: calls(python, name, url) for name, python in pythons.items()}
    failed = sum(bool(error) for told in results.values() for error in told.values())
    print(f"{failed} of {sum(map(len, results.values()))} calls failed")
    if asked.json is not None:
        asked.json.write_text(json.dumps(results, indent=1))
    return 1 if failed else 0


def environment(name: str) -> Path:
    """Return the Python of an environment, which is made at first use."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    stamp = folder / "installed.json"
    wanted = json.dumps(ENVIRONMENTS[name])
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing {', '.join(ENVIRONMENTS[name])} ...", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *ENVIRONMENTS[name]], check=True)
        stamp.write_text(wanted)
    return python


def calls(python: Path, name: str, url: str) -> dict[str, str]:
    """Return the calls of an environment, with what went wrong in each: nothing where it worked."""
    program = Path(__file__).with_name("calls.py")
    done = subprocess.run(
        [str(python), str(program), name, url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        return {name: done.stderr[-2000:]}
    told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    for call, error in told.items():
        print(f"{'FAILED ' if error else 'worked '} {call}{': ' + error if error else ''}")
    return told


if __name__ == "__main__":
    sys.exit(main())

"""Compare what is installed beside this Python with a lock file; an image's build ends with it.

A bill of materials is made from the lock (`make sbom`). So it describes the image only if the image
holds exactly what the lock names, which is what this says. Prints each difference, exit status 1
if there is one. Not in the lock, and allowed: Headrace itself.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

OURS = "headrace"


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(text: str) -> dict[str, str]:
    """Version by name of what the lock names for this Python and machine."""
    found = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        wanted = Requirement(line.partition(" #")[0].strip())
        if wanted.marker is None or wanted.marker.evaluate():
            found[normal(wanted.name)] = next(iter(wanted.specifier)).version
    return found


def installed(paths: list[str] | None = None) -> dict[str, str]:
    """Version by name of the distributions on `sys.path`, or on `paths`."""
    found = distributions() if paths is None else distributions(path=paths)
    return {normal(d.metadata["Name"]): d.version for d in found}


def differences(lock: dict[str, str], here: dict[str, str]) -> list[str]:
    """A line for each distribution that differs."""
    lines = []
    for name in sorted(lock.keys() | here.keys() - {OURS}):
        if lock.get(name) != here.get(name):
            wanted, found = lock.get(name, "nothing"), here.get(name, "nothing")
            lines.append(f"{name}: the lock says {wanted}, installed is {found}")
    return lines


def main() -> int:
    wrong = differences(locked(Path(sys.argv[1]).read_text("utf-8")), installed())
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

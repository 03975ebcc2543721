"""Each part of Headrace that opens a port works on a machine without IPv4.

The parts run in a network namespace that has ::1 and nothing else; making one takes root.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.only_ipv6 import PARTS

ROOT = Path(__file__).parents[2]


def can_unshare() -> bool:
    """Whether a namespace can be made here, and has IPv6."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    check = "ip link set lo up && grep -q . /proc/net/if_inet6"
    done = subprocess.run(["unshare", "-n", "sh", "-c", check], capture_output=True, check=False)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="no network namespace can be made here")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("part", [*PARTS])
def test_it_works_without_ipv4(part: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-m", "tests.support.only_ipv6", part, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert "all is well" in done.stdout, done.stdout[-3000:] + done.stderr[-5000:]

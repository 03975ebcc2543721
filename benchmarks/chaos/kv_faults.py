"""KV that comes late, pulls that fail, prefill replicas that die: what meets a resumed stream."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.chaos.engine_faults.sitecustomize import HIT, ORDER

LATE_S = 8.0
"""More than a remote prefill may take, so that the prompt is computed as well."""


class KvFaults:
    """Breaks what brings KV to decode replicas.

    Args:
        folder: for the files by which engines learn what to break.
    """

    def __init__(self, folder: Path) -> None:
        self._order, self._hit = folder / "kv-order", folder / "kv-hit"
        self._hit.touch()
        self._hit.chmod(0o666)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the app's processes must have."""
        path = [str(Path(__file__).parent / "engine_faults"), os.environ.get("PYTHONPATH", "")]
        return {
            ORDER: str(self._order),
            HIT: str(self._hit),
            "PYTHONPATH": os.pathsep.join(each for each in path if each),
        }

    @property
    def hit(self) -> int:
        """Pulls that were late or failed, since the start."""
        return len(self._hit.read_text().splitlines())

    @contextlib.contextmanager
    def breaking(self, app: Any, fault: str) -> Iterator[None]:
        """Break it for as long as the block takes; one of `KV_FAULTS`."""
        if fault == "prefill_dead":
            over = threading.Event()
            killing = threading.Thread(target=_kill_prefill, args=(app, over), daemon=True)
            killing.start()
            try:
                yield
            finally:
                over.set()
                killing.join()
            return
        self._order.write_text({"kv_late": f"late {LATE_S}", "pull_failed": "fail"}[fault])
        try:
            yield
        finally:
            self._order.unlink()


def _kill_prefill(app: Any, over: threading.Event) -> None:
    """Kill the prefill replicas, and those that come in their place."""
    while True:
        for each in app.status()["replicas"]:
            if each["role"] == "prefill":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each["pid"], signal.SIGKILL)
        if over.wait(1.0):
            return


KV_FAULTS = ("kv_late", "pull_failed", "prefill_dead")

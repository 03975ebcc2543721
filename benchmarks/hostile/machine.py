"""Processor seconds and memory of the processes of the app and of its client, by part."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

PARTS = ("client", "gateway", "decode", "decode_engine", "prefill", "prefill_engine", "grammars")
"""`decode` is the replica's process with the HTTP server and the tokenizer."""


@dataclass(frozen=True)
class Parts:
    """The processes of an app.

    Attributes:
        pids: of the gateway and of the replicas, by role.
    """

    pids: Mapping[str, int]

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds used until now by each of `PARTS`, and by all else as `others`."""
        used: defaultdict[str, float] = defaultdict(float, dict.fromkeys(PARTS, 0.0))
        for process, part in self._processes():
            times = process.cpu_times()
            used[part] += times.user + times.system
            if part == "grammars":  # its trials are children that have ended
                used[part] += times.children_user + times.children_system
        whole = psutil.cpu_times()
        busy = sum(whole) - whole.idle - whole.iowait - whole.guest - whole.guest_nice
        return {**used, "others": busy - sum(used.values())}

    def resident_bytes(self) -> dict[str, int]:
        """Memory of the gateway, the decode replica, and the processes that it has started."""
        held: Counter[str] = Counter()
        for process, part in self._processes():
            if part in ("gateway", "decode", "decode_engine", "grammars"):
                held[part] += process.memory_info().rss
        return dict(held)

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        found = [(psutil.Process(), "client")]
        for role, pid in self.pids.items():
            process = psutil.Process(pid)
            found.append((process, role))
            for child in process.children(recursive=True):
                with_worker = "grammars.worker" in " ".join(child.cmdline())
                found.append((child, "grammars" if with_worker else f"{role}_engine"))
        return found

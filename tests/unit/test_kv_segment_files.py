"""Files of the NVMe tier that readers share while they are open."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace_kvstore.nvme.segment import SegmentFiles


def test_a_file_that_does_not_open_keeps_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, hangs = SegmentFiles(), threading.Event()
    paths = [str(tmp_path / name) for name in ("hangs", "works")]
    for path in paths:
        Path(path).write_bytes(b"x")
    opens = os.open

    def slow(path: str, *rest: int) -> int:
        if path == paths[0]:
            hangs.wait(20)
        return opens(path, *rest)

    monkeypatch.setattr(os, "open", slow)
    with ThreadPoolExecutor(2) as threads:
        stuck = [threads.submit(files.acquire, paths[0]) for _ in range(2)]
        try:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                files.release(files.acquire(paths[1]))
            files.close()
            assert not any(each.done() for each in stuck)
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            hangs.set()
        one, other = (each.result(20) for each in stuck)
    assert one is other and one.users == 2
    files.release(one)
    files.release(other)
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before

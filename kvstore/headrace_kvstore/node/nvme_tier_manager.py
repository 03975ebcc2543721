"""Manager of an NVMe tier: opens it, waits for a busy folder, and tries a failed disk again.

Opening may take long, because it scans the folder and a disk may hang. So it runs in its own
thread. There is no tier until it is done.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import FolderBusy, NvmeTier
from headrace_kvstore.nvme.record import TierEvent
from headrace_kvstore.nvme.slots import open_slot
from headrace_kvstore.settings.node_settings import NodeSettings

logger = logging.getLogger("headrace.kvstore")

HEAL_LIMIT = 16
"""Maximum factor by which the time until a failed disk is tried again grows."""


class NvmeTierManager:
    """Manager of one tier. `tier` is the tier once there is one.

    `opened` is called whenever the tier can be used, at first or again. `ready` is whether it was
    called once and has returned.
    """

    def __init__(
        self,
        settings: NodeSettings,
        file_io: FileIo,
        on_event: Callable[[TierEvent], None],
        opened: Callable[[], None],
    ) -> None:
        self.tier: NvmeTier | None = None
        self.ready = False
        self.reason = "opening"
        self._settings, self._file_io = settings, file_io
        self._on_event, self._opened = on_event, opened
        self._heal_s, self._failed_s = settings.heal_s, -math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-nvme-manager", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Give the folder back; return False if the disk hangs."""
        self._stop.set()
        self._thread.join(timeout_s)
        tier, self.tier, self.reason = self.tier, None, "closed"
        if self._thread.is_alive():
            return False
        if tier is not None:
            tier.close(timeout_s)
            return not tier.stats()["writing_bytes"]
        return True

    def stats(self) -> dict[str, Any]:
        """Return the tier's statistics; without a tier, its state and the reason."""
        tier = self.tier
        if tier is not None:
            return tier.stats()
        return {"state": "off", "reason": self.reason, "blocks": 0, "bytes": 0}

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            try:
                pause_s = self._check()
            except Exception as error:
                logger.exception("the NVMe tier cannot be opened; it is tried again")
                self.reason, pause_s = repr(error), self._settings.retry_s

    def _check(self) -> float:
        """Open or check the tier; return the seconds until the next check."""
        if self.tier is None:
            return self._open()
        look_s = min(1.0, self._settings.heal_s)
        if self.tier.state == "on":
            if time.monotonic() - self._failed_s > HEAL_LIMIT * self._settings.heal_s:
                self._heal_s = self._settings.heal_s
            return look_s
        if not self._stop.wait(self._next_heal_s()):
            logger.info("the NVMe tier in %s is tried again", self._settings.nvme_folder)
            self.tier.heal()
            self._opened()
        return look_s

    def _next_heal_s(self) -> float:
        """Return the seconds until a disk that has just failed is tried again."""
        self._failed_s = time.monotonic()
        wait_s = self._heal_s
        self._heal_s = min(2 * wait_s, HEAL_LIMIT * self._settings.heal_s)
        return wait_s

    def _open_tier(self, folder: Path) -> NvmeTier:
        settings = self._settings
        return NvmeTier.open(
            *(folder, settings.nvme_bytes, settings.segment_bytes, self._file_io),
            sync=settings.nvme_sync,
            owner=settings.name,
            events=[self._on_event],
        )

    def _open(self) -> float:
        settings = self._settings
        assert settings.nvme_folder is not None
        try:
            tier = open_slot(settings.nvme_folder, settings.name, self._open_tier)
        except FolderBusy as error:
            if self.reason != str(error):
                logger.warning("%s; it is waited for", error)
            self.reason = str(error)
            return settings.retry_s
        if tier.state == "off":
            self.reason = tier.reason
            tier.close(0.0)
            return self._next_heal_s()
        self.tier = tier
        self._opened()
        self.ready = True
        return 0.0

"""A scheduler that serves requests as a benchmark says."""

from __future__ import annotations

from headrace_decode.attention.offload.block_manager import OffloadBlockManager
from headrace_decode.attention.offload.scheduler import OffloadingScheduler


class PlannedScheduler(OffloadingScheduler):
    """
    Attributes:
        offload: whether requests that wait are offloaded; None: as the scheduler decides.
    """

    offload: bool | None = None

    def _switch(self, manager: OffloadBlockManager) -> dict[str, int]:
        if self.offload is None:
            return super()._switch(manager)
        for request in self.waiting if self.offload else ():
            if manager.ledger.planned(request.request_id) is None:
                manager.ledger.plan(request.request_id, self._smallest(request))
        return {}

"""A scheduler that serves requests as a benchmark says."""

from __future__ import annotations

from typing import Any

from headrace_decode.attention.offload.scheduler import OffloadSchedulerPart
from headrace_engine.extensions.scheduler import ExtensibleScheduler


class PlannedScheduler(ExtensibleScheduler):
    """
    Attributes:
        offload: whether requests that wait are offloaded; None: as the scheduler decides.
    """

    offload: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        part = self.part(OffloadSchedulerPart)
        assert part is not None
        decide = part.decide

        def planned() -> dict[str, int]:
            if self.offload is None:
                return decide()
            for request in self.waiting if self.offload else ():
                if part.manager.ledger.planned(request.request_id) is None:
                    part.manager.ledger.plan(request.request_id, part.smallest(request))
            return {}

        part.decide = planned  # type: ignore[method-assign]

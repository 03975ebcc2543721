"""Keeps answers that attend to only a part of the KV out of the prefix cache and the store.

The prompt's KV is shared, since it is exact regardless of what the answer attends to. For a sparse
or compressed request, blocks with tokens of the answer are not shared.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.techniques import PARTIAL_KV, keep_ratio_in
from headrace_engine.extensions.extension import SchedulerPart
from headrace_engine.vllm.private_blocks import keep_private


class PrivateAnswers(SchedulerPart):
    """Part of every engine. It costs nothing, and without it approximate KV would be shared.

    It runs before a resumed request gets its earlier tokens (`extension.OURS`): these are tokens of
    the answer, too.
    """

    def before_add(self, request: Any) -> None:
        """Keep the blocks with tokens of the answer private."""
        params = request.sampling_params
        if any(keep_ratio_in(params, name) is not None for name in PARTIAL_KV):
            keep_private(request)

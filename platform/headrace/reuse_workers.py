"""Worker classes that take requests up, or draft, and hand their connectors the model as well; some
attend sparsely, too."""

from __future__ import annotations

from headrace_decode.replay.worker import TakingUpWorker
from headrace_decode.sparse.engine.worker import SparseInReach
from headrace_decode.speculation.drafting_worker import SpeculatingWorker
from headrace_prefill.reuse.engine.worker import ModelInReach


class ReusingTakingUpWorker(ModelInReach, TakingUpWorker):
    """Of engines that do not draft."""


class ReusingSpeculatingWorker(ModelInReach, SpeculatingWorker):
    """Of engines that draft."""


class SparseReusingTakingUpWorker(SparseInReach, ReusingTakingUpWorker):
    """Of engines that do not draft, with sparse attention."""


class SparseReusingSpeculatingWorker(SparseInReach, ReusingSpeculatingWorker):
    """Of engines that draft, with sparse attention."""

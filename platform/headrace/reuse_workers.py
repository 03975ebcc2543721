"""Worker classes that resume requests, or draft, and also give the model to their connectors. Some
attend sparsely, too."""

from __future__ import annotations

from headrace_decode.resume.worker import TakingUpWorker
from headrace_decode.sparse.engine.worker import SparseInReach
from headrace_decode.speculative.drafting_worker import SpeculatingWorker
from headrace_prefill.blending.engine.worker import ModelInReach


class ReusingTakingUpWorker(ModelInReach, TakingUpWorker):
    """Worker of engines that do not draft."""


class ReusingSpeculatingWorker(ModelInReach, SpeculatingWorker):
    """Worker of engines that draft."""


class SparseReusingTakingUpWorker(SparseInReach, ReusingTakingUpWorker):
    """Worker of engines that do not draft, with sparse attention."""


class SparseReusingSpeculatingWorker(SparseInReach, ReusingSpeculatingWorker):
    """Worker of engines that draft, with sparse attention."""

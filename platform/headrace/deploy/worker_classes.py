"""Worker classes that resume requests, or draft, and also give the model to their connectors. Some
attend sparsely, too."""

from __future__ import annotations

from headrace_decode.attention_backend.worker import SparseWorkerMixin
from headrace_decode.resume.worker import ResumeWorker
from headrace_decode.speculative.speculative_worker import SpeculativeWorker
from headrace_prefill.blending.engine.worker import BlendingWorkerMixin


class BlendingWorker(BlendingWorkerMixin, ResumeWorker):
    """Worker of engines that do not draft."""


class BlendingSpeculativeWorker(BlendingWorkerMixin, SpeculativeWorker):
    """Worker of engines that draft."""


class SparseBlendingWorker(SparseWorkerMixin, BlendingWorker):
    """Worker of engines that do not draft, with sparse attention."""


class SparseBlendingSpeculativeWorker(SparseWorkerMixin, BlendingSpeculativeWorker):
    """Worker of engines that draft, with sparse attention."""

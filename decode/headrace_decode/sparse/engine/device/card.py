"""Resources that sparse attention needs on a CUDA GPU: a calibration, memory, compiled kernels.

Its memory is a part of the memory that vLLM found for the KV cache:

    summaries   for all units of the cache, used or not
    scratch     for the rows that are computed together, with the longest KV
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.calibration_file import CalibrationError, Shape
from headrace_decode.sparse.engine._vllm_compat import model_fields
from headrace_decode.sparse.engine.calibration import COMMAND, read_bases
from headrace_decode.sparse.engine.counts import RECENT, SINKS, units_of
from headrace_decode.sparse.engine.device._vllm_compat import use_backend, why_dense
from headrace_decode.sparse.engine.device.step import ROWS_AT_ONCE, DeviceLayer, padded
from headrace_decode.sparse.engine.rows import SparseRows
from headrace_decode.sparse.engine.settings import SparseSettings
from headrace_decode.sparse.kernels._vllm_compat import SEGMENTS, triton_attention
from headrace_decode.sparse.kernels.attention import DecodeRows, attend
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.summaries import DeviceSummaries
from headrace_decode.sparse.layout import Layout
from headrace_decode.sparse.summaries import RANK_BESIDE

BACKEND = "headrace_decode.sparse.engine.device.backend.SparseBackend"
STEP_UNITS = 4096
"""Number of units that a step summarises in all layers, beside those that its own tokens fill."""


@dataclass(frozen=True)
class Card:
    """Sparse attention of one engine on a CUDA GPU.

    Attributes:
        bases: basis of each layer.
        unit_tokens: tokens of a unit.
        heads: number of query heads.
        most_units: maximum units of a request.
    """

    bases: list[Basis]
    unit_tokens: int
    heads: int
    most_units: int

    @classmethod
    def of(cls, config: Any, settings: SparseSettings) -> tuple[Card | None, str | None]:
        """Install the backend in an engine whose model is not loaded yet, and return its card; or
        return why the engine attends densely."""
        if (why := why_dense(config, settings.unit_tokens)) is not None:
            return None, why
        if settings.calibration is None:
            return None, (
                "kernels for GPUs need a basis: set techniques.sparse.calibration, the file that "
                f"`{COMMAND}` makes"
            )
        try:
            shape = Shape.of(model_fields(config))
            bases = read_bases(Path(settings.calibration), shape, settings.unit_tokens)
        except CalibrationError as error:
            return None, f"techniques.sparse.calibration: {settings.calibration}: {error}"
        use_backend(config, BACKEND)
        most = units_of(config.model_config.max_model_len, settings.unit_tokens)
        return cls(bases, settings.unit_tokens, shape.heads, most), None

    def rows(self) -> SparseRows:
        """Return the object that decides which rows are sparse; its work is counted in units."""
        return SparseRows(1, self.unit_tokens, STEP_UNITS)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scores, and of parts of attention that are combined at the end, in fp32."""
        dim = self.bases[0].into.shape[1]
        return 4 * ROWS_AT_ONCE * self.heads * (padded(self.most_units) + SEGMENTS * (dim + 2))

    def cache_bytes(self, available: int, spec: Any) -> int:
        """Return the bytes that are left to the KV cache.

        Args:
            available: bytes that vLLM found for it.
            spec: vLLM's spec of a layer's cache.
        """
        kv_heads, dim, rank = self.bases[0].into.shape
        summary = Layout(self.unit_tokens, dim, RANK_BESIDE, rank).nbytes + 8
        ours = kv_heads * summary * spec.block_size // self.unit_tokens
        page = spec.page_size_bytes
        return max(available - self.scratch_bytes, 0) * page // (page + ours)

    def bind(self, modules: list[Any]) -> int:
        """Give each layer's attention its summaries, and compile the kernels. Return the bytes of
        the summaries.

        Args:
            modules: vLLM's attention module of each layer, with its KV cache.

        Raises:
            ValueError: the kernels cannot read a KV cache of this form.
        """
        taken = 0
        for module, basis in zip(modules, self.bases, strict=True):
            kv = module.kv_cache
            cache = HeadCache.of(kv)
            if cache.unit_tokens != self.unit_tokens:
                raise ValueError(f"its blocks have {cache.unit_tokens} tokens")
            summaries = DeviceSummaries(len(kv), self.unit_tokens, basis, str(kv.device))
            module.impl.sparse = DeviceLayer(summaries, cache)
            taken += summaries.nbytes
        self._compile(modules[0].impl.sparse, modules[0].kv_cache)
        return taken

    def _compile(self, layer: DeviceLayer, kv: torch.Tensor) -> None:
        """Run each kernel once, and the choice with each size that a request may have.

        Block 0 is vLLM's null block, which belongs to no request.
        """
        ints = {"dtype": torch.int32, "device": kv.device}
        layer.summaries.bring_up(layer.cache, torch.zeros(1, dtype=torch.int64, device=kv.device))
        query = torch.zeros((1, self.heads, layer.cache.head_dim), dtype=kv.dtype, device=kv.device)
        width = 16
        while True:
            width = min(width, padded(self.most_units))
            rows = DecodeRows(
                units=torch.zeros((1, width), **ints),
                counts=torch.full((1,), SINKS + RECENT, **ints),
                chosen=torch.full((1,), SINKS + RECENT, **ints),
                newest=torch.zeros(1, **ints),
                fill=torch.ones(1, **ints),
                most=16,
            )
            attend(layer.summaries, layer.cache, query, rows, 1.0, triton_attention)
            if width == padded(self.most_units):
                return
            width *= 2

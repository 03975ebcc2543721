"""Sources from which layers without KV read it. vLLM passes them to the layers' attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace_engine.vllm.attention.layers import Attention
from headrace_prefill.cross_layer.engine.mixture import Mixture


class LiteSources:
    """Mixin that precedes a vLLM attention class, for attention to K of one layer and V of another.

    Args:
        keys, values: vLLM's attention modules of these layers.
    """

    def __init__(self, *args: Any, keys: Attention, values: Attention, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keys, self._values = keys, values


class FusedSources:
    """Mixin that precedes a vLLM attention class, for attention to a mixture of K and V.

    Args:
        first, last: vLLM's attention modules of these layers.
        mixture: the weights.
        memory: the device's memory for mixed blocks (`Mixer`, `Scratch`); shared by all layers.
    """

    def __init__(
        self,
        *args: Any,
        first: Attention,
        last: Attention,
        mixture: Mixture,
        memory: Any,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._first, self._last = first, last
        self._mixture, self._memory = mixture, memory
        self._weights: tuple[Tensor, Tensor] | None = None

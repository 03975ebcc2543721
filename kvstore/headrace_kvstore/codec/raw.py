"""The identity: stored bytes are the layer's own, whatever they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace_kvstore.codec.base import EXACT, Bytes, Errors, check
from headrace_kvstore.codec.shape import LayerShape


@dataclass(frozen=True)
class RawCoder:
    """One copy each way; callers that honour `identity` never need it."""

    layer_bytes: int

    @property
    def stored_bytes(self) -> int:
        return self.layer_bytes

    def encode(self, layer: Bytes, stored: Bytes) -> None:
        check("stored", stored, self.layer_bytes)[:] = check("layer", layer, self.layer_bytes)

    def decode(self, stored: Bytes, layer: Bytes) -> None:
        check("layer", layer, self.layer_bytes)[:] = check("stored", stored, self.layer_bytes)


@dataclass(frozen=True)
class Raw:
    """Takes every shape, latent and engine-quantised ones too."""

    name: str = "raw"
    parameters: Mapping[str, int] = field(default_factory=dict)
    lossy: bool = False
    version: int = field(default=1, init=False)
    window_tokens: int = field(default=0, init=False)
    identity: bool = field(default=True, init=False)
    errors: Errors = field(default=EXACT, init=False)

    def stored_bytes(self, shape: LayerShape) -> int:
        return shape.layer_bytes

    def bind(self, shape: LayerShape) -> RawCoder:
        return RawCoder(shape.layer_bytes)

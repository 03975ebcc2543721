"""`kv_fusion` in config.json: the layers that keep KV, and the layers whose KV the others read.

    "kv_fusion": {"kind": "fused", "storage_layers": 15}

With L layers, of which n are storage layers (numbers from 0):

| kind    | storage layers   | layer i of the others reads                     | source           |
|---------|------------------|-------------------------------------------------|------------------|
| vanilla | all L            | its own KV                                      |                  |
| cla     | 0, g, 2g; g = L/n| K and V of layer g * floor(i / g)               | arXiv 2405.12981 |
| yoco    | 0 to n - 1       | K and V of layer n - 1                          | arXiv 2405.05254 |
| lite    | 0 to n - 1       | K of layer n - 1, V of layer 0                  | arXiv 2512.03870 |
| fused   | 0 to n - 1       | learned mixtures of layers 0 and n - 1, K and V | arXiv 2512.03870 |

`storage_layers` is the number of layers with a KV cache for every kind, so this number is enough to
compute the size of KV.

Converted models name the layers that keep no KV; they may be anywhere in the model:

    "kv_fusion": {"kind": "fused", "storage_layers": 28, "readers": {"9": [2, 8], "14": [3, 13]}}

Layer 9 reads mixtures of layers 2 and 8 if the kind is fused. If it is lite, layer 9 reads K of
layer 2 and V of layer 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

Kind = Literal["vanilla", "cla", "yoco", "lite", "fused"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_KEYS = {"kind", "storage_layers", "readers"}


class CrossLayerConfigError(ValueError):
    """Error: `kv_fusion` in config.json is not valid; the message says why and what would be."""


@dataclass(frozen=True)
class CrossLayerConfig:
    """The layers of a model that read other layers' KV. Made by `of` or `parse`, which check it.

    Attributes:
        layers: number of layers of the model, L.
        storage_layers: number of layers with a KV cache, n.
        readers: for each layer without a KV cache, the two storage layers that it reads; empty if
            the kind alone determines them.
    """

    kind: Kind
    layers: int
    storage_layers: int
    readers: Mapping[int, tuple[int, int]] = field(default_factory=dict, hash=False)

    @staticmethod
    def of(config: Mapping[str, Any]) -> CrossLayerConfig:
        """Read a parsed config.json; the kind is vanilla if it has no `kv_fusion`.

        Raises:
            CrossLayerConfigError: it is not valid.
        """
        layers = config.get("num_hidden_layers")
        if not isinstance(layers, int) or layers < 1:
            raise CrossLayerConfigError("config.json does not give num_hidden_layers")
        section = config.get("kv_fusion")
        if section is None:
            return CrossLayerConfig("vanilla", layers, layers)
        return CrossLayerConfig.parse(section, layers)

    @staticmethod
    def parse(section: Any, layers: int) -> CrossLayerConfig:
        """Read the `kv_fusion` section of a model with this many layers.

        Raises:
            CrossLayerConfigError: it is not valid.
        """
        if not isinstance(section, Mapping):
            raise CrossLayerConfigError(f"kv_fusion is {section!r}: write an object with kind")
        if unknown := sorted(set(section) - _KEYS):
            raise CrossLayerConfigError(
                f"kv_fusion has unknown keys {unknown}: known are {sorted(_KEYS)}"
            )
        kind = section.get("kind")
        if kind not in KINDS:
            raise CrossLayerConfigError(
                f"kv_fusion.kind is {kind!r}: write one of {', '.join(KINDS)}"
            )
        stored = section.get("storage_layers", layers if kind == "vanilla" else None)
        if not isinstance(stored, int) or isinstance(stored, bool):
            raise CrossLayerConfigError(
                f"kv_fusion.storage_layers is {stored!r}: write a whole number"
            )
        cross_layer = CrossLayerConfig(
            cast(Kind, kind), layers, stored, _readers(section.get("readers", {}))
        )
        cross_layer._check()
        return cross_layer

    def section(self) -> dict[str, Any]:
        """Return the `kv_fusion` section, as `parse` takes it."""
        found: dict[str, Any] = {"kind": self.kind, "storage_layers": self.storage_layers}
        if self.readers:
            found["readers"] = {str(n): list(pair) for n, pair in sorted(self.readers.items())}
        return found

    def _check(self) -> None:
        stored, layers = self.storage_layers, self.layers
        if self.readers:
            self._check_readers()
            return
        if self.kind == "vanilla":
            if stored != layers:
                raise CrossLayerConfigError(
                    f"kv_fusion.storage_layers is {stored}: vanilla has all {layers}"
                )
            return
        least = 2 if self.kind in ("lite", "fused") else 1
        if not least <= stored < layers:
            raise CrossLayerConfigError(
                f"kv_fusion.storage_layers is {stored}: {self.kind} in a model of {layers} layers "
                f"takes {least} to {layers - 1}"
            )
        if self.kind == "cla" and layers % stored:
            raise CrossLayerConfigError(
                f"kv_fusion.storage_layers is {stored}: cla takes a divisor of the {layers} layers"
            )

    def _check_readers(self) -> None:
        if self.kind not in ("lite", "fused"):
            raise CrossLayerConfigError(
                f"kv_fusion.readers is for fused and lite, not for {self.kind}"
            )
        if self.storage_layers != self.layers - len(self.readers):
            raise CrossLayerConfigError(
                f"kv_fusion.storage_layers is {self.storage_layers}: {self.layers} layers less "
                f"{len(self.readers)} readers are {self.layers - len(self.readers)}"
            )
        for layer, pair in self.readers.items():
            wrong = [n for n in pair if not 0 <= n < layer or n in self.readers]
            if wrong or layer >= self.layers:
                raise CrossLayerConfigError(
                    f"kv_fusion.readers of layer {layer} is {list(pair)}: write two storage layers "
                    f"below it, in a model of {self.layers} layers"
                )
            if self.kind == "fused" and pair[0] >= pair[1]:
                raise CrossLayerConfigError(
                    f"kv_fusion.readers of layer {layer} is {list(pair)}: write the lower first"
                )

    def stores(self, layer: int) -> bool:
        """Return whether the layer has a KV cache of its own."""
        return self.keys(layer) == (layer,)

    def keys(self, layer: int) -> tuple[int, ...]:
        """Return the storage layers whose K the layer reads; if there are two, K is mixed."""
        return self._read(layer, 0, (self.storage_layers - 1,))

    def values(self, layer: int) -> tuple[int, ...]:
        """Return the storage layers whose V the layer reads; if there are two, V is mixed."""
        return self._read(layer, 1, (0,) if self.kind == "lite" else (self.storage_layers - 1,))

    def _read(self, layer: int, which: int, shared: tuple[int, ...]) -> tuple[int, ...]:
        if self.readers:
            pair = self.readers.get(layer, (layer,))
            return pair if self.kind == "fused" or len(pair) == 1 else (pair[which],)
        if self.kind == "cla":
            group = self.layers // self.storage_layers
            return (layer - layer % group,)
        if layer < self.storage_layers:
            return (layer,)
        return (0, self.storage_layers - 1) if self.kind == "fused" else shared

    @property
    def mixes(self) -> bool:
        """Whether layers have mixing weights."""
        return self.kind == "fused"

    @property
    def first_after_storage(self) -> int:
        """The first layer after the last storage layer. No token's KV depends on it or on the
        layers above it, so a prompt's rows without logits need not run in them."""
        return 1 + max(layer for layer in range(self.layers) if self.stores(layer))


def _readers(given: Any) -> dict[int, tuple[int, int]]:
    """Return `readers` of the JSON section, with numbers as keys.

    Raises:
        CrossLayerConfigError: it is not an object of layers and pairs of layers.
    """
    if not isinstance(given, Mapping):
        raise CrossLayerConfigError(f"kv_fusion.readers is {given!r}: write an object of layers")
    found = {}
    for layer, pair in given.items():
        numbers = isinstance(pair, list | tuple) and all(type(n) is int for n in pair)
        if not str(layer).isdecimal() or not numbers or len(pair) != 2:
            raise CrossLayerConfigError(
                f"kv_fusion.readers has {layer!r}: {pair!r}: write a layer and the two that it "
                "reads"
            )
        found[int(layer)] = (pair[0], pair[1])
    return found

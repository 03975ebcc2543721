"""`kv_fusion` in config.json: which layers keep KV, whose KV the others read, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_prefill.cross_layer.config import CrossLayerConfig, CrossLayerConfigError


def cross_layer(kind: str, stored: int | None = None, layers: int = 6) -> CrossLayerConfig:
    section = {"kind": kind} if stored is None else {"kind": kind, "storage_layers": stored}
    return CrossLayerConfig.of({"num_hidden_layers": layers, "kv_fusion": section})


def pairs(readers: Any, kind: str = "fused", stored: int | None = None) -> dict[str, Any]:
    left = 6 - len(readers) if stored is None else stored
    return {"kind": kind, "storage_layers": left, "readers": readers}


@pytest.mark.parametrize(
    ("kind", "stored", "keys", "values"),
    [
        ("vanilla", None, "0 1 2 3 4 5", "0 1 2 3 4 5"),
        ("cla", 3, "0 0 2 2 4 4", "0 0 2 2 4 4"),
        ("cla", 2, "0 0 0 3 3 3", "0 0 0 3 3 3"),
        ("yoco", 3, "0 1 2 2 2 2", "0 1 2 2 2 2"),
        ("lite", 3, "0 1 2 2 2 2", "0 1 2 0 0 0"),
        ("fused", 3, "0 1 2 0+2 0+2 0+2", "0 1 2 0+2 0+2 0+2"),
    ],
)
def test_each_kind_reads_these_layers(
    kind: str, stored: int | None, keys: str, values: str
) -> None:
    found = cross_layer(kind, stored)
    assert " ".join("+".join(map(str, found.keys(n))) for n in range(6)) == keys
    assert " ".join("+".join(map(str, found.values(n))) for n in range(6)) == values


@pytest.mark.parametrize(
    ("kind", "keys", "values"),
    [
        ("fused", "0 1 0+1 3 1+3 5", "0 1 0+1 3 1+3 5"),
        ("lite", "0 1 0 3 1 5", "0 1 1 3 3 5"),
    ],
)
def test_layers_that_are_named_read_the_layers_that_are_named(
    kind: str, keys: str, values: str
) -> None:
    section = pairs({"2": [0, 1], "4": [1, 3]}, kind)
    found = CrossLayerConfig.of({"num_hidden_layers": 6, "kv_fusion": section})
    assert " ".join("+".join(map(str, found.keys(n))) for n in range(6)) == keys
    assert " ".join("+".join(map(str, found.values(n))) for n in range(6)) == values
    assert [n for n in range(6) if not found.stores(n)] == [2, 4]
    assert found.first_after_storage == 6
    assert CrossLayerConfig.parse(found.section(), 6) == found


def test_a_model_without_the_section_is_vanilla() -> None:
    found = CrossLayerConfig.of({"num_hidden_layers": 4})
    assert (found.kind, found.storage_layers, found.first_after_storage) == ("vanilla", 4, 4)


@pytest.mark.parametrize(
    ("kind", "stored", "first"), [("lite", 3, 3), ("fused", 2, 2), ("yoco", 1, 1), ("cla", 3, 5)]
)
def test_rows_without_logits_end_behind_the_last_storage_layer(
    kind: str, stored: int, first: int
) -> None:
    assert cross_layer(kind, stored).first_after_storage == first


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (3, "kv_fusion is 3: write an object with kind"),
        ({"kind": "fuzed"}, "kind is 'fuzed': write one of vanilla, cla, yoco, lite, fused"),
        ({"kind": "lite"}, "storage_layers is None: write a whole number"),
        ({"kind": "lite", "storage_layers": True}, "storage_layers is True: write a whole"),
        ({"kind": "lite", "storage_layers": 1}, "lite in a model of 6 layers takes 2 to 5"),
        ({"kind": "fused", "storage_layers": 6}, "fused in a model of 6 layers takes 2 to 5"),
        ({"kind": "yoco", "storage_layers": 0}, "yoco in a model of 6 layers takes 1 to 5"),
        ({"kind": "cla", "storage_layers": 4}, "cla takes a divisor of the 6 layers"),
        ({"kind": "vanilla", "storage_layers": 3}, "vanilla has all 6"),
        ({"kind": "lite", "storage": 3}, r"unknown keys \['storage'\]: known are"),
        (pairs({"3": [0, 1]}, kind="yoco"), "readers is for fused and lite, not for yoco"),
        (pairs({"3": [0, 1]}, stored=3), "storage_layers is 3: 6 layers less 1 readers are 5"),
        (pairs({"3": [0, 3]}), r"layer 3 is \[0, 3\]: write two storage layers below it"),
        (pairs({"3": [0, 1], "4": [0, 3]}), r"layer 4 is \[0, 3\]: write two storage layers"),
        (pairs({"6": [0, 1]}), "layer 6 is .* in a model of 6 layers"),
        (pairs({"3": [-1, 1]}), r"layer 3 is \[-1, 1\]: write two storage layers below it"),
        (pairs({"3": [1, 1]}), r"layer 3 is \[1, 1\]: write the lower first"),
        (pairs({"3": [1]}), r"'3': \[1\]: write a layer and the two that it reads"),
        (pairs({"3": [0, True]}), "write a layer and the two that it reads"),
        (pairs({"x": [0, 1]}), "'x': .* write a layer and the two that it reads"),
        ({"kind": "lite", "storage_layers": 3, "readers": 3}, "readers is 3: write an object"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(section: Any, message: str) -> None:
    with pytest.raises(CrossLayerConfigError, match=message):
        CrossLayerConfig.of({"num_hidden_layers": 6, "kv_fusion": section})


@given(
    st.sampled_from(["cla", "yoco", "lite", "fused"]),
    st.integers(2, 40),
    st.integers(1, 40),
)
def test_readers_read_storage_layers_below_them(kind: str, layers: int, stored: int) -> None:
    try:
        found = cross_layer(kind, stored, layers)
    except CrossLayerConfigError:
        return
    storing = [n for n in range(layers) if found.stores(n)]
    assert len(storing) == stored
    for layer in range(layers):
        sources = {*found.keys(layer), *found.values(layer)}
        assert sources <= set(storing)
        assert sources == {layer} or max(sources) < layer

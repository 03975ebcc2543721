"""How a model turns its keys is read from its modules, not from its configuration alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from headrace_engine.rope import Rope, RopeError
from headrace_engine.vllm.rotary_embedding import check_rotary, rope_of_model

POSITIONS, DIM = 4096, 32
CONFIG = {"num_attention_heads": 2, "head_dim": DIM, "max_position_embeddings": POSITIONS}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = DEFAULT | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


class Layer(nn.Module):
    """An attention of a model, with the rotary embedding that vLLM makes for its parameters."""

    def __init__(self, dtype: torch.dtype = torch.float32, **scaling: Any) -> None:
        super().__init__()
        self.attn = nn.Identity()
        neox = scaling.pop("is_neox_style", True)
        parameters = DEFAULT | scaling
        with set_current_vllm_config(VllmConfig()):
            self.rotary_emb = get_rope(DIM, POSITIONS, neox, parameters, dtype)


def checked(*layers: nn.Module, **scaling: Any) -> Rope:
    """The embedding of a model with these layers, whose configuration says `scaling`."""
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    attention = [layer.attn for layer in layers]
    return rope_of_model(CONFIG | {"rope_parameters": DEFAULT | scaling}, model, attention)


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_turns_whole_keys_in_halves_is_known(
    scaling: dict[str, Any], dtype: torch.dtype
) -> None:
    rope = checked(Layer(dtype, **scaling), Layer(dtype, **scaling), **scaling)
    assert len(rope.speeds) == DIM // 2


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("difference", [1, 700, -150])
def test_keys_are_moved_as_the_model_turns_its_pairs(neox: bool, difference: int) -> None:
    layer = Layer(is_neox_style=neox)
    rope, old = checked(layer), torch.arange(200, 205)
    assert rope.is_interleaved is not neox
    keys = torch.randn(5, 2 * DIM, generator=torch.Generator().manual_seed(1))

    def at(positions: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = layer.rotary_emb.forward_native(positions, keys, keys)[1]
        return turned.view(5, 2, DIM)

    moved = rope.shift(at(old), difference)
    torch.testing.assert_close(moved, at(old + difference), atol=2e-4, rtol=0)


def test_layers_that_pair_channels_otherwise_are_refused_by_name() -> None:
    with pytest.raises(RopeError, match=r"layers\.0 \(RotaryEmbedding\) pairs .* another layer"):
        checked(Layer(), Layer(is_neox_style=False))


def test_a_style_that_a_model_sets_later_is_what_counts() -> None:
    layer = Layer()
    layer.rotary_emb.is_neox_style = False
    try:
        assert checked(layer).is_interleaved
    finally:  # vLLM shares the module between layers of the same parameters
        layer.rotary_emb.is_neox_style = True


def test_partly_turned_keys_are_refused() -> None:
    with pytest.raises(RopeError, match="turns 16 channels of a head of 32"):
        checked(Layer(partial_rotary_factor=0.5))


def test_a_layer_without_positions_is_refused() -> None:
    plain = nn.Module()
    plain.attn = nn.Identity()
    with pytest.raises(RopeError, match=r"layers\.1 has no rotary embedding"):
        checked(Layer(), plain)


def test_layers_that_cannot_be_found_are_refused() -> None:
    with pytest.raises(RopeError, match="of 1 layers were not found"):
        check_rotary(Rope.of(CONFIG | DEFAULT), Layer(), [nn.Identity()])


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_theta": 1_000_000.0},
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 1024},
    ],
)
def test_other_angles_than_the_configuration_says_are_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(RopeError, match=r"other angles|not known"):
        checked(Layer(**scaling))


def test_an_embedding_that_tells_nothing_is_refused() -> None:
    layer = Layer()
    layer.rotary_emb = nn.Module()
    layer.rotary_emb.rotary_dim = DIM
    with pytest.raises(RopeError, match="does not say which channels"):
        checked(layer)
    layer.rotary_emb.is_neox_style = True
    with pytest.raises(RopeError, match="not known"):
        checked(layer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
        {"rope_parameters": {"rope_theta": "much"}},
        {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}},
        {"rope_theta": 1e4, "num_attention_heads": None, "head_dim": None},
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RopeError):
        Rope.of(CONFIG | wrong)

"""Keys are moved as if they had been computed at the new position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from headrace_engine.rope import Rope, RopeError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def config(**scaling: Any) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": 10_000.0} | scaling
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=2048,
        rope_parameters=rope,
    )


def rotated(config: LlamaConfig, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys [n, heads, dim] as transformers rotates them."""
    asked = keys.transpose(0, 1)[None]
    cos, sin = LlamaRotaryEmbedding(config)(asked, positions[None])
    _, found = apply_rotary_pos_emb(asked, asked, cos, sin)
    result: torch.Tensor = found[0].transpose(0, 1)
    return result


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("difference", [0, 1, 700, -150])
def test_a_moved_key_is_the_one_computed_there(scaling: dict[str, Any], difference: int) -> None:
    torch.manual_seed(0)
    keys, model = torch.randn(5, 2, 32), config(**scaling)
    old = torch.arange(200, 205)
    moved = Rope.of(model.to_dict()).shift(rotated(model, keys, old), difference)
    torch.testing.assert_close(moved, rotated(model, keys, old + difference), atol=2e-4, rtol=0)


def test_each_key_may_have_a_difference_of_its_own() -> None:
    rope, keys = Rope.of(config().to_dict()), torch.randn(3, 2, 32)
    together = rope.shift(keys, torch.tensor([4, 0, -9]))
    apart = [rope.shift(keys[n : n + 1], by) for n, by in enumerate([4, 0, -9])]
    torch.testing.assert_close(together, torch.cat(apart))


def test_keys_keep_their_dtype_and_are_turned_in_fp32() -> None:
    rope = Rope.of(config().to_dict())
    keys = torch.randn(4, 2, 32).to(torch.bfloat16)
    moved = rope.shift(keys, 123)
    assert moved.dtype == torch.bfloat16
    torch.testing.assert_close(moved, rope.shift(keys.float(), 123).to(torch.bfloat16))


def test_an_older_config_names_theta_beside_the_scaling() -> None:
    old = {"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 10_000.0}
    old["rope_scaling"] = None  # type: ignore[assignment]
    torch.testing.assert_close(Rope.of(old).speeds, Rope.of(config().to_dict()).speeds)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "mrope"])
def test_a_scaling_that_depends_on_length_is_refused_by_name(kind: str) -> None:
    with pytest.raises(RopeError, match=kind):
        Rope.of({"rope_scaling": {"type": kind, "factor": 2.0}, "rope_theta": 1e4})


def test_a_key_that_turns_in_part_is_refused() -> None:
    with pytest.raises(RopeError, match="partial_rotary_factor"):
        Rope.of({"rope_theta": 1e4, "partial_rotary_factor": 0.5})


def test_a_config_without_theta_is_refused() -> None:
    with pytest.raises(RopeError, match="rope_theta"):
        Rope.of({"num_attention_heads": 2, "hidden_size": 64})

"""Checks whether a loaded model turns its keys as a `Rope` does.

A `config.json` does not say whether pairs are (j, j + D/2), as in NeoX, or (2j, 2j + 1), which part
of a head is turned, or which layers are not turned at all. Some models decide that in their code.
So it is read from the modules: each attention's rotary embedding, as vLLM makes it, with the table
of cosines and sines that it really uses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from headrace_engine.rope import Rope, RopeError

TABLE_ERROR = 0.02
"""Largest difference of a cosine or sine that rounding explains. A table in bfloat16 is off by up
to 0.004, one whose angles were computed in fp32 at position 131,072 by up to 0.008."""


def rope_of_model(
    config: Mapping[str, Any], model: nn.Module, attention: Collection[nn.Module]
) -> Rope:
    """Return the rotary embedding of a loaded model.

    Args:
        config: its `config.json`. model, attention: as in `check_rotary`.

    Raises:
        RopeError: its keys cannot be moved exactly; the text says why.
    """
    rotary = [module for module in model.modules() if hasattr(module, "rotary_dim")]
    halves = all(getattr(module, "is_neox_style", True) for module in rotary)
    rope = Rope.of(config, is_interleaved=not halves)
    check_rotary(rope, model, attention)
    return rope


def check_rotary(rope: Rope, model: nn.Module, attention: Collection[nn.Module]) -> None:
    """Refuse a model that turns keys in another way than `rope`.

    Args:
        model: a loaded model.
        attention: its attention modules, whose parents hold the rotary embeddings.

    Raises:
        RopeError: a layer turns its keys otherwise, or how it does so cannot be read.
    """
    left = {id(module) for module in attention}
    checked: set[int] = set()
    for name, parent in model.named_modules():
        mine = {id(child) for child in parent.children()} & left
        if not mine:
            continue
        left -= mine
        found = [child for child in parent.children() if hasattr(child, "rotary_dim")]
        if not found:
            raise RopeError(f"{name} has no rotary embedding")
        for rotary in found:
            if id(rotary) not in checked:
                _check(rope, name, rotary)
                checked.add(id(rotary))
    if left:
        raise RopeError(f"the rotary embeddings of {len(left)} layers were not found")


def _check(rope: Rope, name: str, rotary: Any) -> None:
    kind = f"{name} ({type(rotary).__name__})"
    by_halves = getattr(rotary, "is_neox_style", None)
    if not isinstance(by_halves, bool):
        raise RopeError(f"{kind} does not say which channels are pairs")
    if by_halves is rope.is_interleaved:
        mine, others = ("j + half", "2j + 1") if by_halves else ("2j + 1", "j + half")
        raise RopeError(f"{kind} pairs channels with {mine}, another layer with {others}")
    turned, table = getattr(rotary, "rotary_dim", None), getattr(rotary, "cos_sin_cache", None)
    whole = 2 * len(rope.speeds)
    if turned != whole or getattr(rotary, "head_size", turned) != turned:
        raise RopeError(f"{kind} turns {turned} channels of a head of {whole}: known is all")
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or table.shape[1] != whole:
        raise RopeError(f"{kind} keeps its cosines and sines in a way that is not known")
    positions = _some_positions(len(table))
    cos, sin = rope.turns(positions)
    wanted = torch.cat([cos, sin], -1).squeeze(1)
    error = (table[positions.to(table.device)].float().cpu() - wanted).abs().max()
    if not error <= TABLE_ERROR:
        raise RopeError(f"{kind} turns keys by other angles than its configuration says")


def _some_positions(count: int) -> torch.Tensor:
    """Return the first and the last of `count` positions, and powers of two between: int64."""
    powers = {2**n for n in range(count.bit_length())}
    return torch.tensor(sorted({0, count - 1} | {each for each in powers if each < count}))

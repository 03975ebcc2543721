"""All arms on one text, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.plain import model
from benchmarks.sparse.arms import Arm, Bases, arms
from benchmarks.sparse.attention import Layer, attended
from benchmarks.sparse.texts import KINDS, TAIL_TOKENS, Text, text
from headrace_decode.sparse.basis import Basis
from headrace_lab.models.lm import KV, LM
from headrace_lab.sparse.moments import Moments

Row = dict[str, Any]


LEARNED_TOKENS = 4096
LEARNED_KINDS = "source", "prose", "dialogue"
"""Kinds of texts for tuning; bases are learned from one text of each."""


def measured(folder: str, number: int, held_out: bool, ablated: bool, bases: str) -> list[Row]:
    """All arms on text `number`.

    Args:
        ablated: with ablations.
        bases: file that bases are kept in.
    """
    lm, encode = model(folder)
    chosen = list(arms(learned(lm, encode, Path(bases)), ablated))
    return measured_text(lm, text(number, encode, held_out=held_out), chosen)


def learned(lm: LM, encode: Callable[[str], list[int]], file: Path) -> Bases:
    """Bases of all coordinates, learned from three texts for tuning."""
    if not file.is_file():
        both = [[Moments(lm.kv_heads, lm.dim) for _ in range(lm.layers)] for _ in range(2)]
        for kind in LEARNED_KINDS:
            one = text(KINDS.index(kind), encode, held_out=False).tokens[:LEARNED_TOKENS]
            kv = lm.empty(len(one))

            def watch(layer: int, rows: Tensor, q: Tensor) -> None:
                grouped = q.unflatten(1, (lm.kv_heads, -1)).transpose(0, 1).flatten(1, 2)
                both[0][layer].add_queries(grouped.numpy())

            lm.compute(torch.tensor(one), kv, torch.arange(len(one)), watch=watch)
            for moments in both:
                for layer, keys in zip(moments, kv.keys, strict=True):
                    layer.add_pages(keys.unflatten(0, (-1, 16)).transpose(1, 2).numpy())
        for layer in both[1]:
            layer.add_queries(np.eye(lm.dim, dtype=np.float32)[None].repeat(lm.kv_heads, 0))
        arrays = {
            f"{name}.{layer}.{part}": getattr(one, part)
            for name, moments in zip(("ours", "of_keys"), both, strict=True)
            for layer, one in enumerate(each.basis(lm.dim) for each in moments)
            for part in ("origin", "into", "back")
        }
        np.savez(file, **arrays)
    with np.load(file) as found:
        return Bases(
            *(
                [
                    Basis(*(found[f"{name}.{n}.{part}"] for part in ("origin", "into", "back")))
                    for n in range(lm.layers)
                ]
                for name in ("ours", "of_keys")
            )
        )


def measured_text(lm: LM, one: Text, chosen: list[Arm]) -> list[Row]:
    """Return a row of each arm.

    The prefix is computed once, exactly. Then each arm computes the tail's positions as decoding
    would, one after the other's KV, with sparse attention in all layers.
    """
    tokens = torch.tensor(one.tokens)
    first = len(tokens) - TAIL_TOKENS
    kv, asked = lm.empty(len(tokens)), []

    def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rows >= first if layer == lm.layers - 1 else torch.ones_like(rows).bool()

    def watch(layer: int, rows: Tensor, q: Tensor) -> None:
        asked.append(q[rows >= first].clone())

    logits = lm.compute(tokens, kv, torch.arange(len(tokens)), keep, watch)
    exact = logits.log_softmax(-1)
    main = [arm for arm in chosen if arm.main]
    recalls = _recalls(asked, kv, torch.arange(first, len(tokens)), main)
    right = _right(exact, one, first)
    rows = []
    for arm in chosen:
        found, shares = _sparse(lm, tokens, kv, first, arm)
        kl = (exact.exp() * (exact - found)).sum(-1).double()
        rows.append(
            {
                "text": one.name,
                "kind": one.kind,
                "tokens": len(tokens),
                "arm": arm.name,
                "bytes_vs_k": arm.bytes_vs_k,
                "chosen": sum(shares) / len(shares),
                "recall": recalls.get(arm.name),
                "kl": float(kl.mean()),
                "kl_max": float(kl.max()),
                "top1": float((found.argmax(-1) == exact.argmax(-1)).float().mean()),
                "answers": int(right.sum()),
                "answered": int((right & _right(found, one, first)).sum()),
            }
        )
    return rows


def _sparse(lm: LM, tokens: Tensor, kv: KV, first: int, arm: Arm) -> tuple[Tensor, list[float]]:
    """Return log-probabilities after each position of the tail, and each layer's share of pages."""
    shares = []

    def attend(layer: int, q: Tensor, rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        here = Layer.of(layer, q, rows, keys, values, arm.page_tokens)
        chosen = arm.budget(arm.score(here), here)
        shares.append(float((chosen.sum(-1) / here.counts).mean()))
        return attended(here, chosen)

    # Only the tail's KV is written, and each arm writes it again.
    logits = lm.compute(tokens, kv, torch.arange(first, len(tokens)), attend=attend)
    return logits.log_softmax(-1), shares


def _recalls(asked: list[Tensor], kv: KV, rows: Tensor, chosen: list[Arm]) -> dict[str, float]:
    """Return the share of the exact model's attention to the pages that each arm chooses."""
    found: dict[str, list[float]] = {arm.name: [] for arm in chosen}
    for layer, q in enumerate(asked):
        for size in {arm.page_tokens for arm in chosen}:
            here = Layer.of(layer, q, rows, kv.keys[layer], kv.values[layer], size)
            mass = here.attention().mean(2).unflatten(-1, (-1, size)).sum(-1)
            for arm in chosen:
                if arm.page_tokens == size:
                    kept = arm.budget(arm.score(here), here)
                    found[arm.name].append(float((mass * kept).sum(-1).mean()))
    return {name: sum(each) / len(each) for name, each in found.items()}


def _right(found: Tensor, one: Text, first: int) -> Tensor:
    """Return which of the text's answers are the likeliest token."""
    at = torch.tensor(one.answers, dtype=torch.int64)
    return found[at - 1 - first].argmax(-1) == torch.tensor(one.tokens)[at]

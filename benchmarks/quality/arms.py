"""A prompt's KV under each lossy technique; a technique registers its arms in `ARMS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.kvcodec.model import BLOCK_TOKENS, block_bytes, from_bytes, shape_of
from headrace_kvstore.codec import CODECS
from headrace_lab.blending.correct import Case, corrected, with_depths
from headrace_lab.models.lm import KV, LM

Arm = Callable[[LM, Case, float], KV | None]
"""(model, prompt, budget) -> KV; None if the budget is too small for it."""


def exact(lm: LM, case: Case, budget: float) -> KV:
    """Return the model's own KV."""
    return case.exact.kv


def reused(lm: LM, case: Case, budget: float) -> KV | None:
    """Documents' KV from elsewhere, corrected."""
    done = corrected(lm, case, budget)
    return None if done is None else done.kv


def uncorrected(lm: LM, case: Case, budget: float) -> KV:
    """Return the chunks' KV as it was placed; compute only tokens outside of documents."""
    depths = np.where(case.offsets < 0, lm.layers, 0)
    return with_depths(lm, case, depths).kv


def stored(codec: str, lm: LM, case: Case, budget: float) -> KV:
    """Return whole blocks as the store's codec decodes them, except for its window at the end."""
    chosen, kv = CODECS[codec](), case.exact.kv.clone()
    left = len(case.exact.tokens) - chosen.window_tokens
    for layer in range(lm.layers):
        keys, values = (
            part[layer].transpose(0, 1).to(torch.bfloat16)
            for part in (case.exact.kv.keys, case.exact.kv.values)
        )
        shape = shape_of((keys, values))
        coder = chosen.bind(shape)
        kept = np.empty(coder.stored_bytes, np.uint8)
        for block in range(left // BLOCK_TOKENS):
            layer_bytes = block_bytes((keys, values), block)
            coder.encode(layer_bytes, kept)
            coder.decode(kept, layer_bytes)
            here = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            k, v = from_bytes(layer_bytes, shape)
            kv.keys[layer, here] = k.transpose(0, 1).float()
            kv.values[layer, here] = v.transpose(0, 1).float()
    return kv


ARMS: dict[str, dict[str, tuple[Arm, tuple[float, ...]]]] = {
    "blending": {
        "blending": (reused, (0.1, 0.15, 0.3)),
        "reuse, uncorrected": (uncorrected, (0.0,)),
    },
    "store": {
        "store=fp8": (partial(stored, "fp8"), (1.0,)),
        "store=int4": (partial(stored, "int4"), (1.0,)),
    },
}
"""By technique: arms by name, each with its budgets."""

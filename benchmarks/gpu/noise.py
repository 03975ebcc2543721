"""Sparse attention's calibration of a model with random weights: bases learned from noise.

What is chosen with them means nothing. How long choosing takes does not depend on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def noise_calibration(path: Path, config: dict[str, Any], page_tokens: int) -> Path:
    """Write such a file.

    Args:
        config: the model's config.json.
        page_tokens: of a page.
    """
    from headrace_decode.attention.calibration_file import ModelShape
    from headrace_decode.sparse.engine.calibration import Calibration, write
    from headrace_lab.sparse.moments import Moments

    shape = ModelShape.of(config)
    rng, bases = np.random.default_rng(0), []
    queries, pages = (shape.kv_heads, 300, shape.head_dim), (20, shape.kv_heads, page_tokens)
    for _ in range(shape.layers):
        moments = Moments(shape.kv_heads, shape.head_dim)
        moments.add_queries(rng.normal(size=queries).astype(np.float32))
        moments.add_pages(rng.normal(size=(*pages, shape.head_dim)).astype(np.float32))
        bases.append(moments.basis())
    write(path, Calibration("noise", shape, page_tokens, {0.3: 0.1}, 0.1, 0.3), bases)
    return path

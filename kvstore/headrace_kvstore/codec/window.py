"""Which blocks of a prompt stay raw under a lossy codec, and under which codec they are kept.

Attention looks most at the last tokens, so KIVI never quantises them. At block granularity: of a
prompt with P tokens in blocks of B, a full block stays raw when it holds at least one of the last W
tokens, so that between W and W + B - 1 tokens before the prompt's end are raw (the tail that fills
no block is never stored at all).

The same block may be one of the last in one prompt and early in another. The rule is applied by
writer and reader alike, each to its own prompt: a reader takes a block of its window only if it
finds it raw, else recomputes from there, which is at most W + B - 1 tokens; before the window
either form serves, raw first.

A raw block after quantised ones was computed from them: its bytes are not the exact ones. So it may
not go under the exact codec `raw`, but under `window_codec`, in a namespace of its own; and what an
engine computed after a lossy block must not enter its exact prefix cache either (give such requests
a cache salt, or opt in by model).
"""

from __future__ import annotations

from headrace_kvstore.codec.base import Codec
from headrace_kvstore.codec.raw import Raw


def raw_blocks(prompt_tokens: int, block_tokens: int, window_tokens: int) -> range:
    """Indices of the prompt's full blocks that stay raw; empty for a window of 0 tokens.

        { i : (i + 1) B <= P and (i + 1) B > P - W }

    ValueError for a negative count or blocks without tokens.
    """
    if prompt_tokens < 0 or window_tokens < 0 or block_tokens < 1:
        raise ValueError(
            f"no prompt of {prompt_tokens} tokens in blocks of {block_tokens} "
            f"has a window of {window_tokens}"
        )
    first_token = max(0, prompt_tokens - window_tokens)
    return range(first_token // block_tokens, prompt_tokens // block_tokens)


def window_codec(codec: Codec) -> Codec:
    """The codec of raw blocks that were computed under `codec`: those of its window."""
    return Raw(name=f"{codec.name}.window", parameters=codec.parameters, lossy=codec.lossy)

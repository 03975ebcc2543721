"""A conversation's next turn, in an engine that streams contexts.

    python -m benchmarks.longcontext.turns --json FILE --gate FILE

SmolLM2 in bfloat16 on one thread, with a file of `headrace calibrate bounded`. A prompt of 4,000
tokens is answered with 100; a quarter of its KV is kept. The next prompt has all of these and 200
more tokens. The same prompt under another salt finds nothing of what was held. The cache has room
for the model's 8,192 tokens.

    first_token_vs_anew     seconds to the first token of the next turn, over those of the same
                            prompt under another salt; median of the conversations
    first_token.turn_s, first_token.anew_s
    same_tokens             of an answer of 50, before it differs from the other's; mean
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.longcontext.dropping import BATCH_TOKENS, SHARE, blocks_of
from benchmarks.sparse.serving import LONGEST, Engine, report, same_first
from headrace_decode.bounded.engine.settings import BoundedSettings
from headrace_decode.sparse.engine.settings import SparseSettings

PROMPT, ANSWER, MORE, NEXT, CONVERSATIONS = 4000, 100, 200, 50, 5


def measured(gate: Path | None) -> dict[str, float]:
    """The figures."""
    if gate is None:
        raise SystemExit("--gate FILE is needed: `headrace calibrate bounded --out FILE` makes one")
    engine = Engine(
        SparseSettings("off"),
        BoundedSettings(calibration=str(gate), stream=True),
        num_gpu_blocks_override=blocks_of(LONGEST) + 1,
        max_num_batched_tokens=BATCH_TOKENS,
        async_scheduling=False,
        scheduler_cls="headrace_decode.bounded.engine.scheduler.BoundingTakingUp",
    )

    def answer(prompt: list[int], count: int, salt: str) -> tuple[list[int], float]:
        """And seconds to its first token."""
        begun, first_s, tokens = time.perf_counter(), 0.0, list[int]()
        engine.add(prompt, count, SHARE, salt, technique="bounded")
        for step in engine.steps():
            for each in step.outputs.values():
                first_s = first_s or time.perf_counter() - begun
                tokens += each.token_ids
        return tokens, first_s

    turns, anew, same = list[float](), list[float](), list[int]()
    texts = engine.prompts(PROMPT + MORE, CONVERSATIONS + 1)
    answer(texts.pop(), 2, "warm")
    for number, text in enumerate(texts):
        said, _ = answer(text[:PROMPT], ANSWER, f"a{number}")
        prompt = [*text[:PROMPT], *said, *text[PROMPT:]]
        found, turn_s = answer(prompt, NEXT, f"a{number}")
        other, anew_s = answer(prompt, NEXT, f"b{number}")
        turns.append(turn_s)
        anew.append(anew_s)
        same.append(same_first(found, other))
    return {
        "first_token_vs_anew": statistics.median(a / b for a, b in zip(turns, anew, strict=True)),
        "first_token.turn_s": statistics.median(turns),
        "first_token.anew_s": statistics.median(anew),
        "same_tokens": statistics.mean(same),
    }


if __name__ == "__main__":
    report(__doc__, measured, "gate")

"""A conversation's next turn, in an engine that streams contexts.

    python -m benchmarks.longcontext.turns --json FILE --predictor FILE

SmolLM2 in bfloat16 on one thread, with a file of `headrace lab calibrate compression`. A prompt of
4,000 tokens is answered with 100; a quarter of its KV is kept. The next prompt has all of these and
200 more tokens. The same prompt under another salt finds none of the retained KV. Under a third
salt, the engine has removed the retained KV, like an engine that never had it, and finds it in the
node's store. The cache has room for the model's 8,192 tokens.

    first_token_vs_anew     seconds to the first token of the next turn, over those of the same
                            prompt under another salt; median of the conversations
    stored_vs_anew          the same for a turn that starts from the store's KV
    first_token.turn_s, first_token.stored_s, first_token.anew_s
    same_tokens             number of the answer's 50 tokens before it differs from the answer to
                            the prompt that was computed from scratch; mean
    stored_same_tokens      the same between the answers over the store's KV and over the engine's
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.longcontext.dropping import BATCH_TOKENS, SHARE, blocks_of
from benchmarks.sparse.serving import LONGEST, Engine, report, same_first
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS

PROMPT, ANSWER, MORE, NEXT, CONVERSATIONS = 4000, 100, 200, 50, 5


def measured(predictor: Path | None) -> dict[str, float]:
    """Return the figures."""
    if predictor is None:
        raise SystemExit(
            "--predictor FILE is needed: `headrace lab calibrate compression --output FILE` makes "
            "one"
        )
    memory = TemporaryDirectory(dir="/dev/shm")
    engine = Engine(
        SparseSettings("off"),
        CompressionSettings(calibration=str(predictor), stream=True),
        num_gpu_blocks_override=blocks_of(LONGEST) + 1,
        max_num_batched_tokens=BATCH_TOKENS,
        async_scheduling=False,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[False],
        kv_transfer_config={
            "kv_connector": "HeadraceConnector",
            "kv_connector_module_path": "headrace_engine.store_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "folder": memory.name,
                "dram_bytes": "2GiB",
                "node": False,
            },
        },
    )

    def answer(prompt: list[int], count: int, salt: str) -> tuple[list[int], float]:
        """And seconds to its first token."""
        begun, first_s, tokens = time.perf_counter(), 0.0, list[int]()
        engine.add(prompt, count, SHARE, salt, technique="compression")
        for step in engine.steps():
            for each in step.outputs.values():
                first_s = first_s or time.perf_counter() - begun
                tokens += each.token_ids
        return tokens, first_s

    seconds: dict[str, list[float]] = {"turn": [], "stored": [], "anew": []}
    same, stored_same = list[int](), list[int]()
    *texts, warm, short = engine.prompts(PROMPT + MORE, CONVERSATIONS + 2)
    answer(warm, 2, "warm")
    for number, text in enumerate(texts):
        said: list[int] = []
        for salt in "sa":
            said, _ = answer(text[:PROMPT], ANSWER, f"{salt}{number}")
            answer(short[:64], 2, "")  # by then copies to the store have ended
        prompt = [*text[:PROMPT], *said, *text[PROMPT:]]
        answers = {}
        for name, salt in {"turn": "a", "stored": "s", "anew": "b"}.items():
            if name == "stored" and not engine.llm.reset_prefix_cache():
                raise RuntimeError("the engine does not forget what it held")
            answers[name], first_s = answer(prompt, NEXT, f"{salt}{number}")
            answer(short[:64], 2, "")
            seconds[name].append(first_s)
        same.append(same_first(answers["turn"], answers["anew"]))
        stored_same.append(same_first(answers["turn"], answers["stored"]))

    def over_anew(name: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds["anew"], strict=True))

    return {
        "first_token_vs_anew": over_anew("turn"),
        "stored_vs_anew": over_anew("stored"),
        **{f"first_token.{name}_s": statistics.median(each) for name, each in seconds.items()},
        "same_tokens": statistics.mean(same),
        "stored_same_tokens": statistics.mean(stored_same),
    }


if __name__ == "__main__":
    report(__doc__, measured, "predictor")

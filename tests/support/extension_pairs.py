"""One engine with all extensions and a KV store, and requests that use two of its features.

    told("extension_pairs", FOLDER, {"pairs": [["resume", "store"], ...]})

Says for each pair the answer and what shows that the features were used, beside the answer without
those features that may change no answer. The model is `tests.support.tiny`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from headrace_decode.resume.scheduler import RESUME_TOKENS
from headrace_engine.kv_transfer.handoff import BLENDING_KEY
from tests.support.connectors import beside, blending_connector, store_connector
from tests.support.program import say
from tests.support.prompts import noise
from tests.support.tiny import tiny_llama

BLOCK, BLOCKS = 128, 28
PROMPT = noise(600, 3)
SPARSE_PROMPT = noise(2300, 3)
"""Above the length from which sparse attention chooses pages."""
LONG = noise((BLOCKS + 8) * BLOCK, 4)
"""Longer than the engine's cache."""
DOCUMENT = noise(16 * BLOCK, 5)
MOVED = [*noise(BLOCK, 6), *DOCUMENT, *noise(150, 7)]
"""A prompt with the stored document one block further on."""
ANSWER, LOSSY_ANSWER = 24, 80
"""Tokens of an answer. Pages are summarised and contexts are read again beside the answer."""
RESUMED, DRAFTS = 8, 4
CHANGES_NOTHING = ("resume", "speculation", "store")
REGEX = "( [a-z]{1,8}){8,200}"
SPARSE, COMPRESSION, RECOMPUTED = 0.2, 0.25, 0.2


class Engine:
    """The engine, in this process."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from headrace_decode.attention.settings import SparseSettings
        from headrace_decode.attention_backend.runtime import RUNTIME
        from headrace_decode.compression.engine.settings import CompressionSettings
        from headrace_decode.speculative.settings import engine_arguments
        from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS

        store = {"name": "pairs", "folder": str(folder), "dram_bytes": 256 << 20, "node": False}
        composite = beside(store_connector(store), blending_connector(store))
        speculation = engine_arguments(DRAFTS)
        speculation["additional_config"] |= {
            **SparseSettings(offload_gib=1).additional_config(),
            **CompressionSettings().additional_config(),
        }
        self._llm = LLM(
            str(tiny_llama()),
            dtype="float32",
            enforce_eager=True,
            max_model_len=len(LONG) + 256,
            max_num_batched_tokens=512,
            max_num_seqs=4,
            num_gpu_blocks_override=BLOCKS,
            scheduler_cls=EXTENSIBLE_SCHEDULERS[True],
            kv_transfer_config=KVTransferConfig(**composite),
            **speculation,
        )
        self._runtime = RUNTIME
        self._asked = 0

    def answer(self, features: Collection[str], before: list[int] | None = None) -> dict[str, Any]:
        """The greedy answer to a request that uses these features.

        Args:
            before: the tokens of the answer that a resumed request begins with.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import StructuredOutputsParams

        self._asked += 1
        self._draft("static:4" if "speculation" in features else "off")
        tokens, salt, extra = PROMPT, "", dict[str, Any]()
        if {"sparse", "compression"} & set(features):
            tokens = SPARSE_PROMPT
        if "offload" in features:
            tokens = LONG
        if "blending" in features:
            tokens = MOVED + LONG if "offload" in features else MOVED
            tokens = tokens[: len(LONG)]
            salt = f"technique:blending-{self._asked}:"
            extra["kv_transfer_params"] = {BLENDING_KEY: self._runs(len(tokens))}
        for name, ratio in (("sparse", SPARSE), ("compression", COMPRESSION)):
            if name in features:
                extra[name] = ratio
                salt = f"technique:{name}-{ratio:g}:"
        if before:
            extra[RESUME_TOKENS] = before
        if "store" in features:
            self._llm.reset_prefix_cache()
        grammar = StructuredOutputsParams(regex=REGEX) if "grammars" in features else None
        params = SamplingParams(
            max_tokens=LOSSY_ANSWER if {"sparse", "compression"} & set(features) else ANSWER,
            temperature=0.0,
            ignore_eos=True,
            extra_args=extra or None,
            structured_outputs=grammar,
        )
        prompt = TokensPrompt(prompt_token_ids=tokens, **({"cache_salt": salt} if salt else {}))
        counts = self._counts()
        [output] = self._llm.generate(prompt, params, use_tqdm=False)
        return {
            "tokens": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
            "cached": output.num_cached_tokens,
            "used": {name: n - counts[name] for name, n in self._counts().items()},
        }

    def keep_document(self) -> None:
        """Have the store keep the document's KV."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=[*DOCUMENT, DOCUMENT[0]])
        self._llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)

    def taken(self) -> int:
        """Blocks of the cache that are in use."""
        pool = self._core().scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]

    def _draft(self, mode: str) -> None:
        self._llm.collective_rpc("headrace_command", args=("speculation", {"mode": mode}))

    def _runs(self, tokens: int) -> dict[str, Any]:
        """Where the stored document stands in the prompt."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        core = self._core()
        stored = Request("document", DOCUMENT, SamplingParams(max_tokens=1), None,
                         block_hasher=core.request_block_hasher)  # fmt: skip
        digests = b"".join(bytes(each)[:32] for each in stored.block_hashes)
        run = [BLOCK, 0, len(DOCUMENT), 0, digests]
        return {"runs": [run], "last": tokens - 8, "recompute_ratio": RECOMPUTED}

    def _counts(self) -> dict[str, int]:
        [report] = self._llm.collective_rpc("headrace_command", args=("speculation", {}))
        following: Any = self._runtime.compression
        return {
            "drafted": int(report["counts"].get("drafted_tokens", 0)),
            "sparse_rows": int(self._runtime.sparse_row_count),
            "read": int(following.read),
        }


def main() -> None:
    folder, pairs = Path(sys.argv[1]), json.load(sys.stdin)["pairs"]
    engine = Engine(folder)
    engine.answer(())
    engine.keep_document()
    while not engine.answer(["sparse"])["used"]["sparse_rows"]:
        pass  # rows are dense until the kernels are there
    found, truths = [], dict[str, dict[str, Any]]()
    for pair in pairs:
        rest = [each for each in pair if each not in CHANGES_NOTHING]
        key = "+".join(rest)
        truth = truths[key] = truths.get(key) or engine.answer(rest)
        before = truth["tokens"][:RESUMED] if "resume" in pair else None
        answer = engine.answer(pair, before)
        engine.answer(())  # a worker learns of a request's end with the next step
        found.append({"truth": truth, "answer": answer, "taken": engine.taken()})
    engine.close()
    say(found)


if __name__ == "__main__":
    main()

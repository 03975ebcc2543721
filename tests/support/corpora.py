"""One decode engine that is given a corpus while it serves: what it answers, holds and drafts.

Run as a program, so that the engine leaves with its process:
    python -m tests.support.corpora MODEL_FOLDER > said.json
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tests.support import run
from tests.support.forked import told
from tests.support.program import fork_what_would_be_spawned, say

PROMPT = "The river rises in the hills. It flows through three towns. The three towns are called"
TOKENS = 48
FILLER = "All work and no play makes a dull day, said line {}.\n"


def corpus_session(model: str, *, timeout_s: float = 500.0) -> dict[str, Any]:
    """What happened, by name; see `_main`.

    Raises:
        RuntimeError: the engine failed; with the end of its log.
    """
    run.engine_started()
    said: dict[str, Any] = told("corpora", model, timeout_s=timeout_s)
    return said


async def _main(model: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt

    from headrace_decode.llm.planned_llm import PlannedLLM
    from headrace_decode.speculative.corpus_loader import CorpusLoader
    from headrace_decode.speculative.settings import engine_arguments

    fork_what_would_be_spawned()
    arguments = AsyncEngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        **engine_arguments(8, mode="static:8", corpora=True),
    )
    llm = PlannedLLM.from_engine_args(arguments)
    loader = CorpusLoader(llm.tokenize, llm.corpus)
    prompt = llm.tokenize([PROMPT])[0]
    serial = iter(range(100))

    async def answer(tenant: str, **extra: Any) -> list[int]:
        params = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, extra_args=extra or None
        )
        asked = TokensPrompt(prompt_token_ids=prompt, cache_salt=tenant)
        async for output in llm.generate(asked, params, f"request-{next(serial)}"):
            last = output
        return list(last.outputs[0].token_ids)

    async def told(**command: Any) -> Any:
        return await loader.command(command, "own")

    async def accepted(tenant: str) -> list[int]:
        """Drafts from each corpus of which something was accepted, behind one more answer."""
        found = await answer(tenant, headrace_keep=0)
        assert found == plain, "a corpus changed an answer"
        return [each["accepted"] for each in (await told(do="list"))["corpora"]]

    plain = await answer("nobody", headrace_draft=0)
    text = PROMPT + llm.get_tokenizer().decode(plain)
    names = {"corpus": "c", "version": 1, "tenant": "a"}
    said: dict[str, Any] = {}
    said["part"] = await told(do="part", **names, part=0, texts=[text])
    said["before the flip"] = await accepted("a")
    said["flip"] = await told(do="flip", **names, teller="own")
    said["list"] = (await told(do="list"))["corpora"]
    said["another tenant"] = await accepted("b")
    said["its tenant"] = await accepted("a")
    # A large one for all, while somebody is being answered.
    filler = "".join(FILLER.format(number) for number in range(30_000))
    names = {"corpus": "filler", "version": 2}
    loading = told(do="part", **names, part=0, texts=[filler])
    found, said["large"] = await asyncio.gather(answer("nobody", headrace_draft=0), loading)
    said["answered meanwhile"] = found == plain
    said["large flip"] = await told(do="flip", **names, tenant=None, teller="own")
    said["drop"] = [await told(do="drop", corpus="c", tenant="a", version=3) for _ in range(2)]
    said["names"] = [each["corpus"] for each in (await told(do="list"))["corpora"]]
    llm.shutdown()
    return said


if __name__ == "__main__":
    say(asyncio.run(_main(sys.argv[1])))

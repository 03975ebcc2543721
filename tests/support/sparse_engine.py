"""A vLLM engine in its own process that attends sparsely where requests ask, driven by
`SparseEngine`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.kvstore.child import Child, serve
from headrace_decode.sparse.engine.calibration import Calibration, Shape, write
from headrace_decode.sparse.engine.settings import SparseSettings
from headrace_decode.sparse.offline.calibrate import Learning
from headrace_prefill.reuse.offline.lm import LM
from tests.support import run
from tests.support.plain_llama import PlainLlama
from tests.support.program import IN_ONE_PROCESS, engine_environment
from tests.support.tiny import HEAD_DIM, KV_HEADS

BLOCKS = 57
"""Three prompts of 18 blocks, one block of vLLM's own, and too few for all three to grow."""
NEAR = 2e-3
"""Logits closer than this may change places between this engine and plain torch."""


class SparseEngine:
    """The engine, from outside. `do` calls a method of `Engine`.

    Args:
        calibrated: on these tokens; None for an engine without a basis.
    """

    def __init__(
        self, model: Path, sparse: bool = True, calibrated: list[int] | None = None
    ) -> None:
        self._folder = TemporaryDirectory()
        self.log = Path(self._folder.name) / "log"
        calibration = Path(self._folder.name) / "calibration"
        if calibrated is not None:
            calibrate(model, calibrated, calibration)
        environment = engine_environment(**IN_ONE_PROCESS)
        run.engine_started()
        options = {"model": model, "sparse": int(sparse)}
        if calibrated is not None:
            options["calibration"] = calibration
        self._child = Child("sparse_engine", options, environment, self.log, "tests.support.")
        self._child.answer()

    def do(self, action: str, **parameters: Any) -> Any:
        """As `Child.do`."""
        return self._child.do(action, **parameters)

    def end(self) -> None:
        """End it."""
        self._child.end()
        self._folder.cleanup()


def calibrate(model: Path, tokens: list[int], file: Path) -> None:
    """Write a calibration of what these tokens teach."""
    learning = Learning(LM(str(model)), SparseSettings.unit_tokens)
    with torch.no_grad():
        learning.add(tokens)
    shape = Shape.of(json.loads((model / "config.json").read_text()))
    found = Calibration("tiny", shape, SparseSettings.unit_tokens, {0.1: 0.01}, 0.02, 0.1)
    write(file, found, learning.bases())


class Engine:
    """The engine's own process."""

    def __init__(self, model: str, sparse: bool, calibration: str | None) -> None:
        from vllm import LLM

        from headrace_decode.sparse.engine.bound import BOUND

        self._plain = PlainLlama(Path(model))
        settings = SparseSettings(calibration=calibration)
        told: dict[str, Any] = {
            "additional_config": settings.additional_config(),
            "worker_cls": "headrace_decode.sparse.engine.worker.SparseTakingUpWorker",
        }
        self._llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            max_num_batched_tokens=1024,
            num_gpu_blocks_override=BLOCKS,
            disable_log_stats=False,
            **(told if sparse else {}),
        )
        self._bound = BOUND

    def answers(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Greedy answers to requests that come together.

        Args:
            requests: `tokens`, `max_tokens`, and the share of their KV (`sparse`; None for all).
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        rows, made, preempted = self._bound.found, self._made(), self._preemptions()
        prompts, params = [], []
        for each in requests:
            share = each.get("sparse")
            salt = {} if share is None else {"cache_salt": f"technique:sparse-{share}:"}
            prompts.append(TokensPrompt(prompt_token_ids=each["tokens"], **salt))
            extra = None if share is None else {"sparse": share}
            count = each.get("max_tokens", 16)
            params.append(
                SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, extra_args=extra)
            )
        results = self._llm.generate(prompts, params, use_tqdm=False)
        return {
            "tokens": [list(result.outputs[0].token_ids) for result in results],
            "sparse_rows": self._bound.found - rows,
            "made": self._made() - made,
            "preemptions": self._preemptions() - preempted,
        }

    def bases(self) -> list[int]:
        """Coordinates of each layer's basis; none without bases."""
        found = [each.basis for each in self._bound._rows._book.summaries]  # type: ignore
        return [one.into.shape[-1] for one in found if one is not None]

    def forget(self) -> None:
        """Have no prefixes."""
        self._llm.reset_prefix_cache()

    def greedy(self, tokens: list[int], answer: list[int]) -> bool:
        """Whether an answer is plain torch's, but for logits that are all but equal."""
        whole, layers = [*tokens, *answer], self._plain.layers
        nothing = torch.zeros(layers, len(whole), KV_HEADS, HEAD_DIM)
        computed = self._plain.compute(whole, [layers] * len(whole), nothing, nothing)
        logits = computed.logits[len(tokens) - 1 : -1]
        best, _ = logits.max(-1)
        mine = logits[range(len(answer)), answer]
        return bool((mine >= best - NEAR).all())

    def _made(self) -> int:
        rows = self._bound._rows
        return 0 if rows is None else rows._book.made  # type: ignore[attr-defined]

    def _preemptions(self) -> int:
        metrics = self._llm.get_metrics()
        return sum(int(m.value) for m in metrics if m.name == "vllm:num_preemptions")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--sparse", type=int, default=1)
    parser.add_argument("--calibration")
    args = parser.parse_args()
    serve(lambda: Engine(args.model, bool(args.sparse), args.calibration))


if __name__ == "__main__":
    main()

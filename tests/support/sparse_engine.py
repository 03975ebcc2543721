"""A vLLM engine in its own process that attends sparsely where requests ask, driven by
`SparseEngine`."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.kvstore.child import Child, serve
from headrace_decode.attention.calibration_file import CalibrationResult, ModelShape
from headrace_decode.attention.offload.scheduler import OffloadSchedulerPart
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine import calibration as predictors
from headrace_decode.compression.engine.scheduler import CompressionSchedulerPart
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_decode.sparse.engine.calibration import Calibration, write
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER
from headrace_lab.models.lm import LM
from headrace_lab.sparse.calibrate import Learning
from tests.support import run
from tests.support.forked import Forked
from tests.support.moved import positions_of
from tests.support.plain_llama import PlainLlama
from tests.support.program import IN_ONE_PROCESS, engine_environment
from tests.support.tiny import HEAD_DIM, KV_HEADS

BLOCKS = 57
"""Three prompts of 18 blocks, one block of vLLM's own, and too few for all three to grow."""
SHARES = "sparse", "compression"
NEAR = 2e-3
"""Logits closer than this may change places between this engine and plain torch."""


class SparseEngine:
    """The engine, from outside. `do` calls a method of `Engine`.

    Args:
        calibrated: on these tokens; None for an engine without a basis.
        offload_gib: of host memory. blocks, longest, batch: as of `Engine`.
        runner: as on a card (`as_card`), with this model runner of vLLM's; None: as on a CPU.
        bounded: whether requests may drop KV. has_predictor: with a random predictor.
        stream: whether all such contexts are streamed.
        store: where its KV store's memory is; None: it has none.
    """

    def __init__(
        self,
        model: Path,
        sparse: bool = True,
        calibrated: list[int] | None = None,
        offload_gib: float = 0,
        blocks: int = BLOCKS,
        longest: int = 4096,
        batch: int = 1024,
        runner: str | None = None,
        bounded: bool = False,
        has_predictor: bool = False,
        stream: bool = False,
        store: Path | None = None,
    ) -> None:
        self._folder = TemporaryDirectory()
        self.log = Path(self._folder.name) / "log"
        calibration = Path(self._folder.name) / "calibration"
        if calibrated is not None:
            calibrate(model, calibrated, calibration)
        environment = engine_environment(**IN_ONE_PROCESS)
        if runner is not None:
            environment |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": runner}
        run.engine_started()
        options: dict[str, Any] = {"model": model, "sparse": int(sparse), "blocks": blocks}
        options |= {"offload": offload_gib, "longest": longest, "batch": batch}
        options |= {"compression": 1} if bounded else {}
        options |= {"stream": 1} if stream else {}
        options |= {"store": store} if store is not None else {}
        if runner is not None:
            options["block"] = SparseSettings.page_tokens
        if calibrated is not None:
            options["calibration"] = calibration
        if has_predictor:
            options["predictor"] = Path(self._folder.name) / "predictor"
            write_predictor(model, options["predictor"])
        module = "sparse_engine" if runner is None else "card_engine"
        begin = Forked if runner is None else None  # Triton reads its variable when it is imported
        self._child = Child(module, options, environment, self.log, "tests.support.", begin)
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
    learning = Learning(LM(str(model)), SparseSettings.page_tokens)
    with torch.no_grad():
        learning.add(tokens)
    shape = ModelShape.of(json.loads((model / "config.json").read_text()))
    found = Calibration("tiny", shape, SparseSettings.page_tokens, {0.1: 0.01}, 0.02, 0.1)
    write(file, found, learning.bases())


def write_predictor(model: Path, file: Path) -> None:
    """Write a predictor for a model, of chance."""
    shape = ModelShape.of(json.loads((model / "config.json").read_text()))
    told = CalibrationResult("tiny", shape, SparseSettings.page_tokens, {0.25: 0.1})
    predictors.write(file, told, random_predictor(shape))


def random_predictor(shape: ModelShape) -> ImportancePredictor:
    """Of such a model."""
    heads, size, width = (shape.layers, shape.kv_heads), 2 * shape.head_dim, 4
    shapes = (*heads, size, width), (*heads, width), (*heads, width), (*heads, size), heads
    rng = torch.Generator().manual_seed(0)
    return ImportancePredictor(*(0.1 * torch.randn(each, generator=rng) for each in shapes))


class Engine:
    """The engine's own process.

    Args:
        offload_gib: of host memory. blocks: of the cache. longest: tokens of a request.
        batch: tokens of a step. block: tokens of a block.
        store: as of `SparseEngine`.
    """

    def __init__(
        self,
        model: str,
        sparse: bool,
        calibration: str | None,
        offload_gib: float,
        blocks: int,
        longest: int,
        batch: int,
        block: int,
        bounded: int,
        stream: int,
        predictor: str | None,
        store: str | None,
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from headrace_decode.attention_backend.runtime import RUNTIME

        self._plain = PlainLlama(Path(model))
        settings = SparseSettings(calibration=calibration, offload_gib=offload_gib)
        told: dict[str, Any] = {
            "additional_config": settings.additional_config(),
            "worker_cls": EXTENSIBLE_WORKER,
        }
        if offload_gib or bounded:
            told["scheduler_cls"] = EXTENSIBLE_SCHEDULERS[True]
        if bounded:
            bounds = CompressionSettings(calibration=predictor, stream=bool(stream))
            told["additional_config"] |= bounds.additional_config()
        if store:
            told["kv_transfer_config"] = KVTransferConfig(
                kv_connector="HeadraceConnector",
                kv_connector_module_path="headrace_engine.store_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"folder": store, "dram_bytes": 64 << 20, "node": False},
            )
        self._llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            block_size=block,
            max_model_len=longest,
            max_num_batched_tokens=batch,
            max_num_seqs=min(batch, 256),
            num_gpu_blocks_override=blocks,
            disable_log_stats=False,
            **(told if sparse else {}),
        )
        self._bound = RUNTIME
        self._choices = list[tuple[int, Any, Any]]()

    def answers(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Greedy answers to requests that come together.

        Args:
            requests: `tokens`, `max_tokens`, and the share of their KV that they attend to
                (`sparse`; None for all) or keep of their contexts (`compression`); `arrives` as of
                `asked_of`.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        rows, made, preempted = self._bound.sparse_row_count, self._made(), self._preemptions()
        prompts, params = [], []
        for each in requests:
            extra = asked_of(each)
            mark = "-".join(f"{name}-{each[name]:g}" for name in SHARES if each.get(name))
            salt = {"cache_salt": f"technique:{mark}:"} if mark else {}
            prompts.append(TokensPrompt(prompt_token_ids=each["tokens"], **salt))
            count = each.get("max_tokens", 16)
            params.append(
                SamplingParams(
                    max_tokens=count,
                    temperature=0.0,
                    ignore_eos=True,
                    extra_args=extra,
                )
            )
        results = self._llm.generate(prompts, params, use_tqdm=False)
        return {
            "tokens": [list(result.outputs[0].token_ids) for result in results],
            "cached": [result.num_cached_tokens for result in results],
            "sparse_rows": self._bound.sparse_row_count - rows,
            "made": self._made() - made,
            "preemptions": self._preemptions() - preempted,
        }

    def offload(self) -> dict[str, int]:
        """What is and was offloaded; all of host memory and of the cache that is free."""
        found: Any = self._bound.offloading
        scheduler: Any = self._llm.llm_engine.engine_core.engine_core.scheduler
        manager = scheduler.part(OffloadSchedulerPart).manager
        return {
            "held": len(found),
            "sparse": found.sparse,
            "staged": found.staged,
            "host_taken": manager.ledger.host_blocks - found.memory.host.free_blocks,
            "host_promised": manager.ledger.host_blocks - manager.ledger.free_host_blocks,
            "taken": manager.block_pool.num_gpu_blocks
            - 1
            - manager.block_pool.get_num_free_blocks(),
        }

    def bounded(self) -> dict[str, Any]:
        """What is followed, read and dropped, and blocks of the cache that are taken."""
        following: Any = self._bound.compression
        scheduler: Any = self._llm.llm_engine.engine_core.engine_core.scheduler
        scheduling = scheduler.part(CompressionSchedulerPart)
        pool = scheduler.part(OffloadSchedulerPart).manager.block_pool
        return {
            "followed": bool(following),
            "courses": len(scheduling.jobs) + len(scheduling.incremental or ()),
            "read": following.read,
            "dropped": following.dropped,
            "taken": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    def _watch(self) -> dict[str, Any]:
        """What `offload` and `bounded` say, where there are such requests."""
        found = {} if self._bound.compression is None else self.bounded()
        return found if self._bound.offloading is None else found | self.offload()

    def bounded_answer(self, tokens: list[int], share: float, count: int) -> dict[str, Any]:
        """A greedy answer, step by step, of a request whose context is dropped meanwhile.

        Returns:
            tokens: the answer.
            exact, held: whether what it said before and behind the drop is what plain torch says
                over all KV, and over what is held.
            kept: share of the context's pairs that is held.
            before, after: blocks that are taken, at most and at last.
        """
        following: Any = self._bound.compression
        select_rows, rows = following.select_rows, []

        def watched(*step: Any) -> Any:
            found = select_rows(*step)
            rows.extend(found[0])
            return found

        following.select_rows = watched
        answer, taken, _ = self._bounded_steps(tokens, share, count)
        following.select_rows = select_rows
        held, first = rows[0].held, rows[0].kv_tokens - 1
        whole, layers, n = [*tokens, *answer], self._plain.layers, len(tokens)
        nothing = torch.zeros(layers, len(whole), KV_HEADS, HEAD_DIM)
        exact = self._plain.compute(whole, [layers] * len(whole), nothing, nothing)
        there = [following.head_pages.read_head_pages(layer) for layer in held.head_pages]
        gone, keys, values = self._absent(there, held, exact.keys, exact.values)
        depths = [0] * first + [layers] * (len(whole) - first)
        over = self._plain.compute(whole, depths, keys, values, gone=gone)
        return {
            "tokens": answer,
            "exact": self._agrees(exact.logits[n - 1 : first], answer[: first - n + 1]),
            "held": self._agrees(over.logits[:-1], answer[first - n + 1 :]),
            "kept": 1 - float(gone[..., : held.tokens].float().mean()),
            "before": max(taken),
            "after": taken[-1],
        }

    def _bounded_steps(
        self, tokens: list[int], share: float, count: int
    ) -> tuple[list[int], list[int], int]:
        """A greedy answer, blocks that are taken behind each step, and tokens of the prompt that
        were not computed."""
        from vllm import SamplingParams

        engine, taken, answer, cached = self._llm.llm_engine, [0], list[int](), 0
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"technique:compression-{share:g}:"}
        params = SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, extra_args={"compression": share}
        )
        engine.add_request("watched", prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer, cached = list(output.outputs[0].token_ids), output.num_cached_tokens
            taken.append(self.bounded()["taken"] or taken[-1])
        return answer, taken, cached

    def streamed_answer(self, tokens: list[int], share: float, count: int) -> dict[str, Any]:
        """A greedy answer of a request whose context is streamed.

        Returns:
            tokens: the answer.
            right: whether it is what plain torch says, whose rows see what was held each time.
            chosen: positions up to which a choice was made, that of an earlier one among them with
                which it began, if that was the one asked before this.
            cached: tokens of the prompt that were not computed.
            most, after: blocks that are taken, at most and at last.
        """
        following: Any = self._bound.compression
        select_rows, choices = following.select_rows, list[tuple[int, Any, Any]]()

        def watched(*step: Any) -> Any:
            found = select_rows(*step)
            for row in found[0]:
                if not choices or choices[-1][1] is not row.held:
                    at = row.held.head_pages
                    there = [following.head_pages.read_head_pages(layer) for layer in at]
                    first = row.kv_tokens - (row.tokens.stop - row.tokens.start)
                    choices.append((first, row.held, there))
            return found

        following.select_rows = watched
        answer, taken, cached = self._bounded_steps(tokens, share, count)
        following.select_rows = select_rows
        for number, (_, held, _) in enumerate(self._choices):
            if same(held, choices[0][1]):
                choices = self._choices[:number] + choices
        self._choices = choices
        whole, layers = [*tokens, *answer], self._plain.layers
        keys = values = torch.zeros(layers, len(whole), KV_HEADS, HEAD_DIM)
        gone, logits = torch.zeros(layers, KV_HEADS, len(whole), dtype=torch.bool), []
        begins = [0, *(first for first, _, _ in choices), len(whole)]
        for number, (begin, end) in enumerate(itertools.pairwise(begins)):
            if number:
                _, held, there = choices[number - 1]
                gone, keys, values = self._absent(there, held, keys, values)
            depths = [0] * begin + [layers] * (end - begin) + [0] * (len(whole) - end)
            found = self._plain.compute(whole, depths, keys, values, gone=gone)
            keys, values = found.keys, found.values
            logits.append(found.logits)
        behind = torch.cat(logits)[len(tokens) - 1 : -1]
        return {
            "tokens": answer,
            "right": self._agrees(behind, answer),
            "chosen": [held.tokens for _, held, _ in choices],
            "cached": cached,
            "most": max(taken),
            "after": taken[-1],
        }

    def _absent(
        self, there: list[Any], held: Any, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Which of a prompt's keys [layers, n, kv_heads, dim] are in no head page, of which `there`
        are K and V, [kv_heads, places, dim] of each layer: bool [layers, kv_heads, n]. And the
        prompt's keys and values, those of the head pages among them."""
        gone = torch.zeros(keys.shape[0], keys.shape[2], keys.shape[1], dtype=torch.bool)
        gone[..., : held.tokens], keys, values = True, keys.clone(), values.clone()
        for layer, counts in enumerate(held.counts):
            for head, count in enumerate(counts):
                moved, fitted = (
                    one[head, : count * SparseSettings.page_tokens] for one in there[layer]
                )
                at = positions_of(moved, keys[layer, : held.tokens, head])
                gone[layer, head, at] = False
                keys[layer, at, head], values[layer, at, head] = moved, fitted
        return gone, keys, values

    def aborted(self, requests: list[dict[str, Any]], after: int) -> dict[str, Any]:
        """Abort requests after so many steps; what `offload` and `bounded` say one step later, and
        what they said `before`."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        for number, each in enumerate(requests):
            params = SamplingParams(
                max_tokens=each["max_tokens"],
                temperature=0.0,
                ignore_eos=True,
                extra_args=asked_of(each),
            )
            engine.add_request(f"abort{number}", {"prompt_token_ids": each["tokens"]}, params)
        for _ in range(after):
            engine.step()
        before = self._watch()
        engine.abort_request([f"abort{number}" for number in range(len(requests))])
        while engine.has_unfinished_requests():
            engine.step()
        self.answers([{"tokens": requests[0]["tokens"][:64], "max_tokens": 2}])
        return {**self._watch(), "before": before}

    def bases(self) -> list[int]:
        """Coordinates of each layer's basis; none without bases."""
        assert self._bound.summary_table is not None
        layouts = [each.layout for each in self._bound.summary_table.summaries]
        return [one.coordinates for one in layouts if one.coordinates]

    def forget(self) -> None:
        """Have no prefixes."""
        self._llm.reset_prefix_cache()

    def greedy(self, tokens: list[int], answer: list[int]) -> bool:
        """Whether an answer is plain torch's, but for logits that are all but equal."""
        whole, layers = [*tokens, *answer], self._plain.layers
        nothing = torch.zeros(layers, len(whole), KV_HEADS, HEAD_DIM)
        computed = self._plain.compute(whole, [layers] * len(whole), nothing, nothing)
        return self._agrees(computed.logits[len(tokens) - 1 : -1], answer)

    def _agrees(self, logits: Tensor, answer: list[int]) -> bool:
        best, _ = logits.max(-1)
        mine = logits[range(len(answer)), answer]
        return bool((mine >= best - NEAR).all())

    def _made(self) -> int:
        summary_table = self._bound.summary_table
        return 0 if summary_table is None else summary_table.made

    def _preemptions(self) -> int:
        metrics = self._llm.get_metrics()
        return sum(int(m.value) for m in metrics if m.name == "vllm:num_preemptions")


def same(held: Any, other: Any) -> bool:
    """Whether both are what was held of one context at one time."""
    return held.tokens == other.tokens and bool((held.counts == other.counts).all())


def asked_of(request: dict[str, Any]) -> dict[str, Any] | None:
    """A request's extra arguments. One that `arrives` says that its KV comes as a whole, as from a
    prefill engine."""
    found = {name: request[name] for name in SHARES if request.get(name)}
    if request.get("arrives"):
        found["kv_transfer_params"] = {"remote": "somewhere"}
    return found or None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--sparse", type=int, default=1)
    parser.add_argument("--calibration")
    parser.add_argument("--predictor")
    parser.add_argument("--store")
    parser.add_argument("--offload", type=float, default=0)
    sizes = {"blocks": BLOCKS, "longest": 4096, "batch": 1024, "block": 128, "compression": 0}
    sizes |= {"stream": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    told = [*(getattr(args, name) for name in sizes), args.predictor, args.store]
    serve(lambda: Engine(args.model, bool(args.sparse), args.calibration, args.offload, *told))


if __name__ == "__main__":
    main()

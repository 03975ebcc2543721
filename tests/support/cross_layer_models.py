"""Small random models with `kv_fusion`, and vLLM engines that serve them one after the other.

Driven by JSON lines, as `benchmarks.kvstore.child` says. Only importing vLLM takes long, so one
process makes all engines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.kvstore.child import Child, serve
from headrace_engine.kv_transfer.handoff import PARAMS_KEY, pull_params
from headrace_lab.models.decoder import Decoder
from tests.support import run
from tests.support.connectors import (
    beside,
    checked_nixl_connector,
    side_channel,
    store_connector,
)
from tests.support.forked import Forked
from tests.support.program import IN_ONE_PROCESS, engine_environment

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 6, 4, 2, 32, 128, 512
BLOCK = 32
POSITIONS = 1024


READERS = {"2": [0, 1], "4": [1, 3], "5": [0, 3]}
"""Layers that keep no KV, some of them below layers that do."""


def config(
    kind: str, style: str = "llama", storage_layers: int = 3, readers: Any = None
) -> dict[str, Any]:
    """A config.json: grouped heads, 6 layers of which the first 3 keep KV, or all but `readers`."""
    cross_layer = {"kind": kind, "storage_layers": LAYERS if kind == "vanilla" else storage_layers}
    cross_layer |= {"readers": readers} if readers else {}
    return {
        "architectures": [f"KVFusion{style.capitalize()}ForCausalLM"],
        "model_type": style,
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 65536.0,  # speeds are powers of 2, so angles are exact in float32
        "tie_word_embeddings": style == "qwen3",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "kv_fusion": cross_layer,
    }


def write_model(
    folder: Path, described: dict[str, Any], seed: int = 0, served: dict[str, Any] | None = None
) -> Path:
    """Write config.json and random weights, under which attention is peaked and matters.

    Args:
        served: config.json in place of `described`, if engines are to see another.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(served or described))
    torch.manual_seed(seed)
    model = Decoder(described)
    for name, weight in model.named_parameters():
        if ".mix." in name or "norm" in name:
            torch.nn.init.normal_(weight, 0.5 if ".mix." in name else 1.0, 0.3)
        else:
            gain = 2.0 if name.rsplit(".", 2)[1] in ("q_proj", "o_proj", "lm_head") else 1.0
            torch.nn.init.normal_(weight, 0.0, gain / weight.shape[1] ** 0.5)
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    if described["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def reference(folder: Path) -> Decoder:
    """The model in a folder, in plain torch and float64."""
    model = Decoder(json.loads((folder / "config.json").read_text()))
    missing, unknown = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    return model.double().eval()


@torch.no_grad()
def true_logprobs(model: Decoder, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probability of each token of an answer."""
    logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
    found = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])
    return found[:, 0].tolist()


class FusingEngines:
    """A process for engines, one at a time.

    Args:
        hands_over: whether they may hand KV to engines of other processes over NIXL.
    """

    def __init__(self, hands_over: bool = False) -> None:
        self._folder = TemporaryDirectory()
        environment = engine_environment(**IN_ONE_PROCESS)
        if hands_over:
            environment |= side_channel()
        run.engine_started()
        log = Path(self._folder.name) / "log"
        self._child = Child("cross_layer_models", {}, environment, log, "tests.support.", Forked)
        self._child.answer()

    def do(self, action: str, **parameters: Any) -> Any:
        """Call a method of `Engines`. Raises RuntimeError if it failed."""
        return self._child.do(action, **parameters)

    def end(self) -> None:
        """End the engine and its process."""
        self._child.end()
        self._folder.cleanup()


class Engines:
    """The process's part."""

    def __init__(self) -> None:
        from headrace_prefill.cross_layer.engine.plugin import register

        register()
        self._llm: Any = None

    def open(
        self,
        model: str,
        store: dict[str, Any] | None = None,
        hands_over: bool = False,
        **options: Any,
    ) -> int:
        """Start an engine in place of the one before; returns its number of KV blocks.

        Args:
            store: the store connector's `kv_connector_extra_config`.
            hands_over: whether it hands KV to other engines over NIXL, and pulls theirs.
            options: of vLLM's.
        """
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

        self.close()
        if store is not None:
            options["kv_transfer_config"] = KVTransferConfig(**store_connector(store))
        if hands_over:
            transfer = checked_nixl_connector()
            if store is not None:
                # MultiConnector takes statistics for mappings, as they are between two processes.
                KVConnectorStats.__getitem__ = lambda stats, name: getattr(stats, name)
                transfer = beside(transfer, store_connector(store))
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = LLM(
            model,
            dtype=options.pop("dtype", "float32"),
            enforce_eager=True,
            skip_tokenizer_init=options.pop("skip_tokenizer_init", True),
            disable_log_stats=False,
            block_size=BLOCK,
            max_model_len=POSITIONS,
            **options,
        )
        return self._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks

    def answers(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        prompt_logprobs: bool = False,
        transfers: list[dict[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """Greedy answers to prompts of token ids, all at once.

        Args:
            transfers: for each prompt, what another engine said of the KV that it keeps, or
                `produce_params()` to keep it for another engine.
        """
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                logprobs=0,
                prompt_logprobs=0 if prompt_logprobs else None,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if transfer is None else {PARAMS_KEY: pull_params(transfer)},
            )
            for transfer in transfers or [None] * len(prompts)
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = []
        for result in self._llm.generate(inputs, params, use_tqdm=False):
            [output] = result.outputs
            found.append(
                {
                    "tokens": list(output.token_ids),
                    "logprobs": _chosen(output.logprobs, output.token_ids),
                    "cached": result.num_cached_tokens,
                    "transfer": result.kv_transfer_params,
                    "prompt": _chosen(
                        (result.prompt_logprobs or [None])[1:], result.prompt_token_ids[1:]
                    ),
                }
            )
        return found

    def forget(self) -> bool:
        """Empty the engine's own prefix cache; False while blocks are still being saved. No step
        runs by itself in an engine of this process, and only a step learns that a save ended."""
        self._llm.llm_engine.step()
        return bool(self._llm.reset_prefix_cache())

    def block_tokens(self) -> int:
        """Tokens of a block: vLLM makes blocks longer for a model with recurrent layers."""
        return int(self._llm.llm_engine.vllm_config.cache_config.block_size)

    def counted(self, name: str) -> float:
        """A counter of vLLM's metrics."""
        return sum(metric.value for metric in self._llm.get_metrics() if metric.name == name)

    def transfers(self) -> dict[str, float]:
        """Pulls by what became of them (`pull_proof.stats`)."""
        found = [m for m in self._llm.get_metrics() if m.name == "vllm:headrace_transfers"]
        return {metric.labels["event"]: metric.value for metric in found}

    def count_rows(self) -> None:
        """Have `rows` count from now on."""
        runner = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        last = runner.worker.model_runner.model.model.layers[-1]
        self._rows = 0
        last.register_forward_hook(self._count)

    def rows(self) -> int:
        """Rows that the last layer computed."""
        return self._rows

    def _count(self, layer: Any, given: Any, made: Any) -> None:
        self._rows += len(made[0])

    def close(self) -> None:
        if self._llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()


class Guesser:
    """vLLM's custom draft source: what followed the last token where it stood before."""

    def __init__(self, vllm_config: Any) -> None:
        self._most = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """It has none."""

    def propose(
        self,
        sampled_token_ids: Any,
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            tokens = token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()
            before = [at for at in range(len(tokens) - 1) if tokens[at] == tokens[-1]]
            at = before[-1] + 1 if sampled and before else len(tokens)
            drafts.append(tokens[at : at + self._most])
        return drafts


def _chosen(steps: Any, tokens: Any) -> list[float]:
    """The log-probability of each token, where vLLM gives them."""
    return [step[token].logprob for step, token in zip(steps, tokens, strict=False)]


def main() -> None:
    argparse.ArgumentParser().parse_args()
    serve(Engines)


if __name__ == "__main__":
    main()

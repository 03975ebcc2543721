"""The model that quality is measured with is the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.blending.arms import Case, ours
from headrace_lab.models.exact import Exact, score
from headrace_lab.models.lm import LM
from headrace_lab.texts.prompts import Prompt

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (partial(MistralConfig, sliding_window=None), MistralForCausalLM),
    "qwen3": (partial(Qwen3Config, head_dim=16), Qwen3ForCausalLM),
}


def tiny(folder: Path, kind: str = "llama") -> Any:
    torch.manual_seed(0)
    described, made = MODELS[kind]
    model = made(described(**SIZES)).float()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 0.7, 0.3)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, tokens = tiny(tmp_path, kind), torch.randint(0, 200, (90,))
    lm = LM(str(tmp_path))
    wanted = model(tokens[None]).logits[0]
    found = lm.compute(tokens, lm.empty(90), torch.arange(90))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        lm.follow(tokens, lm.prefill(tokens), 60), wanted[60:], atol=1e-3, rtol=1e-3
    )


def test_a_mistral_with_a_window_is_refused(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=32)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its attention has a sliding window"):
        LM(str(tmp_path))


@torch.no_grad()
def test_a_budget_of_all_is_the_exact_model(tmp_path: Path) -> None:
    tiny(tmp_path)
    lm, tokens = LM(str(tmp_path)), torch.randint(0, 200, (80,)).tolist()
    prompt = Prompt("p", tokens, [(10, 30)], [[1, 2, 3]], 60, "inside", 0.5)
    exact = Exact.of(lm, tokens, 5)
    case = Case.of(lm, prompt, exact)
    placed = score(lm, exact, case.placed)
    corrected = ours()(lm, case, 1.0 + case.probed(lm).rows / len(case.chunk))
    assert corrected is not None
    torch.testing.assert_close(
        corrected.kv.values[:, :-1], exact.kv.values[:, :-1], atol=1e-4, rtol=1e-4
    )
    assert score(lm, exact, corrected.kv).kl < 1e-6
    assert placed.kl > 1e-3

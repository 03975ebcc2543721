"""The plain decoder against formulas written out token by token, and that it can be trained."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from headrace_lab.models import decoder
from headrace_lab.models.decoder import Decoder
from headrace_prefill.cross_layer.config import CrossLayerConfigError
from tests.support.cross_layer_models import config

KINDS = ["vanilla", "cla", "yoco", "lite", "fused"]
TOKENS = [5, 17, 400, 17, 3, 99, 250]


def made(kind: str, style: str = "llama") -> Decoder:
    torch.manual_seed(1)
    model = Decoder(config(kind, style)).double()
    for name, weight in model.named_parameters():
        if "norm" in name or ".mix." in name:
            torch.nn.init.normal_(weight, 0.7, 0.3)
    return model


def naive(model: Decoder, tokens: list[int]) -> np.ndarray:
    """Logits of the last token, in loops over layers, positions and heads."""
    shape = model.shape
    weights = {name: w.detach().numpy() for name, w in model.state_dict().items()}
    dim, group = shape.head_dim, shape.heads // shape.kv_heads

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + shape.eps) * scale

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        y = x.copy()
        for j in range(dim // 2):
            angle = position * 65536.0 ** (-2 * j / dim)
            a, b = x[..., j], x[..., j + dim // 2]
            y[..., j] = a * math.cos(angle) - b * math.sin(angle)
            y[..., j + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return y

    hidden = weights["model.embed_tokens.weight"][tokens]
    keys: dict[int, np.ndarray] = {}
    values: dict[int, np.ndarray] = {}
    for layer in range(shape.cross_layer.layers):
        at = f"model.layers.{layer}."
        x = norm(hidden, weights[at + "input_layernorm.weight"])

        def heads(name: str, x: np.ndarray = x, at: str = at) -> np.ndarray:
            y = (x @ weights[f"{at}self_attn.{name}_proj.weight"].T).reshape(len(x), -1, dim)
            scale = weights.get(f"{at}self_attn.{name}_norm.weight")
            y = y if scale is None else norm(y, scale)
            return y if name == "v" else np.stack([turned(y[p], p) for p in range(len(y))])

        if f"{at}self_attn.k_proj.weight" in weights:
            keys[layer], values[layer] = heads("k"), heads("v")
        elif shape.cross_layer.kind == "lite":
            keys[layer], values[layer] = keys[2], values[0]
        elif shape.cross_layer.kind == "yoco":
            keys[layer], values[layer] = keys[2], values[2]
        elif shape.cross_layer.kind == "cla":
            keys[layer], values[layer] = keys[layer - 1], values[layer - 1]
        else:
            a1, an = (weights[f"{at}self_attn.mix.{n}_keys"] for n in ("first", "last"))
            b1, bn = (weights[f"{at}self_attn.mix.{n}_values"] for n in ("first", "last"))
            keys[layer], values[layer] = np.zeros_like(keys[0]), b1 * values[0] + bn * values[2]
            for channel in range(dim):
                pair = channel % (dim // 2)
                keys[layer][..., channel] = (
                    a1[:, pair] * keys[0][..., channel] + an[:, pair] * keys[2][..., channel]
                )
        query, mixed = heads("q"), np.zeros((len(tokens), shape.heads * dim))
        for p in range(len(tokens)):
            for head in range(shape.heads):
                k, v = (kv[layer][: p + 1, head // group] for kv in (keys, values))
                score = np.exp(k @ query[p, head] / math.sqrt(dim))
                mixed[p, head * dim : (head + 1) * dim] = score / score.sum() @ v
        hidden = hidden + mixed @ weights[at + "self_attn.o_proj.weight"].T
        x = norm(hidden, weights[at + "post_attention_layernorm.weight"])
        gate = x @ weights[at + "mlp.gate_proj.weight"].T
        up = x @ weights[at + "mlp.up_proj.weight"].T
        hidden = hidden + gate / (1 + np.exp(-gate)) * up @ weights[at + "mlp.down_proj.weight"].T
    return norm(hidden[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("style", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_the_formulas(kind: str, style: str) -> None:
    model = made(kind, style)
    found = model(torch.tensor([TOKENS]))[0, -1].detach().numpy()
    np.testing.assert_allclose(found, naive(model, TOKENS), atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_none_behind_it(kind: str) -> None:
    model = made(kind)
    whole, part = model(torch.tensor([TOKENS])), model(torch.tensor([TOKENS[:4]]))
    torch.testing.assert_close(whole[:, :4], part)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_gets_a_gradient_and_layers_without_kv_have_none_to_make_it(kind: str) -> None:
    with torch.enable_grad():
        model = made(kind)
        logits = model(torch.tensor([TOKENS]))
        cross_entropy(logits[0, :-1], torch.tensor(TOKENS[1:])).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name
    projecting = {n for n in range(6) if hasattr(model.model.layers[n].self_attn, "k_proj")}
    assert projecting == {n for n in range(6) if model.shape.cross_layer.stores(n)}


def test_layers_with_a_window_are_refused() -> None:
    windows = ["full_attention"] * 5 + ["sliding_attention"]
    with pytest.raises(CrossLayerConfigError, match="sliding_attention"):
        Decoder({**config("lite"), "layer_types": windows})


def test_fused_with_the_weights_of_yoco_is_yoco() -> None:
    fused, yoco = made("fused"), made("yoco")
    yoco.load_state_dict(fused.state_dict(), strict=False)
    for layer in fused.model.layers[3:]:
        for name, weight in layer.self_attn.mix.named_parameters():
            torch.nn.init.constant_(weight, float(name.startswith("last")))
    tokens = torch.tensor([TOKENS])
    torch.testing.assert_close(fused(tokens), yoco(tokens))


def test_short_texts_are_attended_to_as_long_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = made("fused"), torch.tensor([TOKENS])
    short = model(tokens)
    monkeypatch.setattr(decoder, "SHORT", 0)
    torch.testing.assert_close(model(tokens), short)

"""What sparse attention is measured with: others' rules, budgets, texts, and the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.sparse.arms import Arm, baseline, kept, of_form
from benchmarks.sparse.attention import Layer, Mass, Share, attended
from benchmarks.sparse.figures import figures
from benchmarks.sparse.measure import measured_text
from benchmarks.sparse.texts import KINDS, TAIL_TOKENS, Text, text
from headrace_lab.models.lm import LM
from headrace_lab.sparse.baselines import BASELINES, EXTRA, ORACLE
from headrace_lab.sparse.reference import Form

HEADS, GROUP, PAGE, DIM = 2, 3, 8, 16


def layer(tokens: int, rows: int, seed: int = 0) -> tuple[Layer, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q = torch.randn(rows, HEADS * GROUP, DIM)
    keys, values = torch.randn(2, tokens, HEADS, DIM)
    at = torch.arange(tokens - rows, tokens)
    return Layer.of(0, q, at, keys, values, PAGE), q, keys, values


def exact(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last rows."""
    k, v = (one.transpose(0, 1).repeat_interleave(GROUP, 0) for one in (keys, values))
    seen = torch.ones(len(q), len(keys)).tril(len(keys) - len(q)).bool()
    found = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, seen)
    return found.transpose(0, 1).flatten(1)


class TestAttention:
    @pytest.mark.parametrize("tokens", [80, 83])
    def test_to_all_pages_is_exact(self, tokens: int) -> None:
        here, q, keys, values = layer(tokens, 10)
        chosen = Share(1.0)(torch.zeros(HEADS, 10, here.keys.shape[1]), here)
        torch.testing.assert_close(attended(here, chosen), exact(q, keys, values))

    def test_to_the_first_and_newest_pages_is_exact_over_their_tokens(self) -> None:
        here, q, keys, values = layer(84, 1)
        chosen = Share(0.0)(torch.zeros(HEADS, 1, here.keys.shape[1]), here)
        kept = [*range(8), *range(72, 84)]
        torch.testing.assert_close(attended(here, chosen), exact(q, keys[kept], values[kept]))


class TestBudgets:
    def test_of_mass_choose_all_for_all_of_it(self) -> None:
        here, *_ = layer(83, 10)
        chosen = Mass(1.0)(baseline(ORACLE)(here), here)
        assert (chosen.sum(-1) == here.counts).all()

    def test_of_mass_keep_to_their_bounds_and_to_what_is_always_chosen(self) -> None:
        here, *_ = layer(400, 3)
        scores = baseline(ORACLE)(here)
        few, many = Mass(0.0)(scores, here), Mass(1.0, cap=0.2)(scores, here)
        assert (few.sum(-1) == 3).all()
        assert few[:, -1, [0, -2, -1]].all()
        assert (many.sum(-1) == 10).all()
        assert (Mass(0.0, floor=0.2)(scores, here) == many).all()

    def test_of_mass_choose_as_much_as_they_say(self) -> None:
        here, *_ = layer(400, 3)
        scores = baseline(ORACLE)(here)
        mass = (scores * Mass(0.7)(scores, here)).sum(-1) / scores.sum(-1)
        assert (mass >= 0.7).all() and (mass < 0.75).all()


class TestRivals:
    def test_quest_is_above_every_logit(self) -> None:
        here, *_ = layer(80, 10)
        queries = here.queries.flatten(1, 2)
        bound = BASELINES["Quest"].logits(here.keys, queries)
        logits = torch.einsum("hmd,hntd->hmnt", queries, here.keys)
        assert (bound >= logits.amax(-1) - 1e-5).all()

    def test_the_oracle_is_the_attention(self) -> None:
        here, *_ = layer(80, 1)
        scores = baseline(ORACLE)(here)[:, 0, :9]
        mass = here.attention()[:, 0].unflatten(-1, (-1, PAGE)).sum(-1)[..., :9]
        wanted = (mass / mass.sum(-1, keepdim=True)).sum(1)
        torch.testing.assert_close(scores, wanted)

    @pytest.mark.parametrize("name", ["mean", "clusters", "pairs"])
    def test_know_pages_of_equal_keys(self, name: str) -> None:
        here, *_ = layer(80, 1)
        keys = here.keys[:, :, :1].expand(-1, -1, PAGE, -1)
        # 4 bits hold 0 and one size of number exactly.
        keys = keys.sign()
        queries = here.queries.flatten(1, 2)
        rule = (BASELINES | EXTRA)[name].logits(keys, queries).softmax(-1)
        torch.testing.assert_close(rule, ORACLE.logits(keys, queries).softmax(-1))

    def test_the_merged_keys_leave_out_small_dimensions(self) -> None:
        here, *_ = layer(80, 1)
        keys = here.keys[:, :, :1].expand(-1, -1, PAGE, -1).clone()
        keys[..., 4:] = 0
        queries = here.queries.flatten(1, 2)
        found = BASELINES["KVStar"].logits(keys, queries).softmax(-1)
        torch.testing.assert_close(found, ORACLE.logits(keys, queries).softmax(-1))


class TestTheReference:
    def test_of_full_rank_and_precision_is_the_oracle(self) -> None:
        here, *_ = layer(80, 1)
        queries = here.queries.flatten(1, 2)
        form = Form(rank=PAGE - 1, bits=None)
        found = form.logits(form.summary(here.keys), queries)
        torch.testing.assert_close(found, ORACLE.logits(here.keys, queries), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("by_norm", [True, False])
    def test_with_all_keys_kept_but_one_is_the_oracle(self, by_norm: bool) -> None:
        here, *_ = layer(80, 1)
        queries = here.queries.flatten(1, 2)
        form = Form(rank=0, bits=None, kept=PAGE - 1, by_norm=by_norm)
        found = form.logits(form.summary(here.keys), queries)
        torch.testing.assert_close(found, ORACLE.logits(here.keys, queries), rtol=1e-4, atol=1e-4)

    def test_counts_its_bytes(self) -> None:
        assert Form().nbytes(16, 64) == 212
        assert Form(bits=None, rank=1).nbytes(16, 64) == 4 * (2 * 64 + 16)


def letters(words: str) -> list[int]:
    return [ord(letter) % 128 for letter in words]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_answers_of_texts_stand_before_the_tail(number: int) -> None:
    one = text(number, letters, held_out=False)
    tail = len(one.tokens) - TAIL_TOKENS
    before = "".join(map(chr, one.tokens[: tail - 64]))
    if one.kind == "needle":
        said = "".join(map(chr, one.tokens[tail:]))
        lines = said.split("\n")[1:-1]
        assert lines and all(line in before for line in lines)
    if one.kind == "copy":
        assert "".join(map(chr, one.tokens[tail:])) in before
    assert bool(one.answers) == (one.kind in ("copy", "needle"))
    assert all(tail < at < len(one.tokens) for at in one.answers)
    assert len(one.tokens) <= 8192


@torch.no_grad()
def test_a_share_of_all_pages_is_the_exact_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=200,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.3,
        )
    ).save_pretrained(tmp_path)
    tokens = torch.randint(0, 200, (700,)).tolist()
    one = Text("t", "copy", tokens, [650, 699])
    lm = LM(str(tmp_path))
    chosen = [
        Arm("ours", kept(None), Share(1.0), main=True),
        Arm("few", of_form(Form()), main=True),
    ]
    chosen += [Arm(name, baseline(rule), main=True) for name, rule in BASELINES.items()]
    chosen += [Arm("oracle", baseline(ORACLE), main=True)]
    rows = measured_text(lm, one, chosen)
    assert rows[0]["kl"] < 1e-6 and rows[0]["recall"] == pytest.approx(1.0)
    assert rows[1]["kl"] > rows[0]["kl"] and 0.1 < rows[1]["recall"] < 1.0
    assert rows[1]["chosen"] == pytest.approx(0.1, abs=0.02)
    found = figures(rows)
    assert found["recall_gap_closed"] > 1.0 and found["kl_at_10pct_vs_best_baseline"] < 1e-3

"""What bounded KV is measured with: contexts, held KV, streaming, and the figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.longcontext.arms import ARMS, OURS, Arm
from benchmarks.longcontext.context import Context, computed
from benchmarks.longcontext.figures import figures
from benchmarks.longcontext.held import Held
from benchmarks.longcontext.judge import judge, judged_rows
from benchmarks.longcontext.measure import measured
from benchmarks.longcontext.quantised import quantised, ratio
from benchmarks.longcontext.streaming import ByEntropy, Streaming
from benchmarks.longcontext.texts import FACTS, KINDS, TURNS, Case, case
from headrace_lab.models.lm import LM

TOKENS, FIRST = 240, 200
LAYERS, HEADS = 3, 2
PAIRS = LAYERS * HEADS * FIRST


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=200,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=HEADS,
            tie_word_embeddings=True,
            initializer_range=0.3,
        )
    ).save_pretrained(folder)
    with torch.no_grad():
        yield LM(str(folder))


@pytest.fixture(scope="module")
def context(lm: LM) -> Context:
    tokens = torch.randint(0, 200, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    facts = {0.5: [FIRST + 20, FIRST + 21]}
    return computed(lm, Case("0 turns", "turns", tokens, FIRST, list(range(210, 240)), facts))


def encode(text: str) -> list[int]:
    """A token of four letters, so that pieces have a like number of tokens to a model's."""
    return [sum(text[at : at + 4].encode()) for at in range(0, len(text), 4)]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_what_is_judged_stands_behind_the_context(number: int) -> None:
    one = case(number, encode, 2000, held_out=False)
    assert one.kind == KINDS[number]
    assert min(one.judged) > one.first and max(one.judged) < len(one.tokens)
    assert 0.8 * 2000 < len(one.tokens) < 1.5 * 2000
    assert {at for each in one.facts.values() for at in each} <= set(one.judged)


def test_a_context_without_room_for_a_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="a copy takes 1361 tokens or more, not 1000"):
        case(5, encode, 1000, held_out=False)


def test_facts_stand_at_even_depths_and_are_all_asked_for() -> None:
    one = case(0, encode, 2000, held_out=False)
    depths = sorted(one.facts)
    assert len(depths) == FACTS and depths[0] < 0.15 and depths[-1] > 0.85
    gaps = [b - a for a, b in itertools.pairwise(depths)]
    assert max(gaps) < 0.12


def test_the_first_sentence_is_asked_for_last() -> None:
    one = case(1, encode, 2000, held_out=False)
    assert list(one.facts) == [0.0] and one.facts[0.0][-1] == len(one.tokens) - 1
    assert len(one.judged) > TURNS


def test_holding_all_is_the_exact_model(lm: LM, context: Context) -> None:
    whole = Held.whole(context.kv, 0, FIRST)
    logp = whole.follow(lm, torch.tensor(context.case.tokens), FIRST)
    torch.testing.assert_close(logp[judged_rows(context.case)], context.exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_keeps_within_its_share(lm: LM, context: Context, arm: Arm) -> None:
    always = arm.always
    share = 0.9 if always.whole_layers else 0.25
    held = arm.held(lm, context, share)
    assert 0 < held.pairs * arm.bytes_of_pair(lm) <= share * PAIRS
    assert all(len(k) >= always.sinks + always.newest for layer in held.keys for k in layer)


def test_with_all_bytes_nothing_is_lost(lm: LM, context: Context) -> None:
    row = measured(lm, context, ARMS[0], 1.0)
    assert row["kl"] < 1e-6 and row["kept"] == 1.0


@pytest.mark.parametrize("blocks", [1, 3])
def test_streaming_with_room_for_all_is_the_exact_model(
    lm: LM, context: Context, blocks: int
) -> None:
    tokens = torch.tensor(context.case.tokens)
    held, most = Streaming(blocks).held(lm, tokens[:FIRST], PAIRS)
    assert held.pairs == most == PAIRS
    logp = held.follow(lm, tokens, FIRST)[judged_rows(context.case)]
    torch.testing.assert_close(logp, context.exact, atol=1e-4, rtol=1e-4)


def test_streaming_holds_the_budget_and_one_block_at_most(lm: LM, context: Context) -> None:
    total = PAIRS // 4
    held, most = Streaming(4).held(lm, torch.tensor(context.case.tokens[:FIRST]), total)
    assert held.pairs == total and most <= total + PAIRS // 4


def test_streaming_by_entropy_keeps_two_layers_whole_and_the_budget(
    lm: LM, context: Context
) -> None:
    tokens = torch.tensor(context.case.tokens)
    total = int(0.9 * PAIRS)
    held, most = ByEntropy(4).held(lm, tokens[:FIRST], total)
    assert 0 < held.pairs <= total <= most <= total + PAIRS // 4
    assert [len(k) for layer in held.keys[:2] for k in layer] == [FIRST] * 4
    assert len({len(k) for k in held.keys[2]}) == HEADS, "heads have budgets of their own"
    whole, _ = ByEntropy(4).held(lm, tokens[:FIRST], PAIRS)
    logp = whole.follow(lm, tokens, FIRST)[judged_rows(context.case)]
    torch.testing.assert_close(logp, context.exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("codec", "bytes_", "error"), [("fp8", 0.55, 0.07), ("int4", 0.33, 0.2)])
def test_quantised_kv_is_near_what_it_was_in_fewer_bytes(
    codec: str, bytes_: float, error: float
) -> None:
    rng = torch.Generator().manual_seed(2)
    keys, values = ([torch.randn(n, 64, generator=rng) for n in (0, 1, 40, 64)] for _ in range(2))
    found = quantised(Held([keys], [values]), codec)
    for mine, its in ((keys, found.keys[0]), (values, found.values[0])):
        for one, other in zip(mine, its, strict=True):
            assert one.shape == other.shape
            assert not len(one) or float((one - other).norm() / one.norm()) < error
    assert 0.25 < ratio(codec, 64) < bytes_


def test_figures_compare_with_the_best_press(context: Context) -> None:
    case_, exact = context.case, context.exact
    near, far = ((exact + size * torch.randn(exact.shape)).log_softmax(-1) for size in (0.01, 1.0))
    rows = [
        judge(case_, OURS, 0.25, 0.25, exact, near),
        judge(case_, "kvpress KVzip", 0.25, 0.25, exact, far),
        judge(case_, "kvpress window", 0.25, 0.25, exact, far),
    ]
    found = figures(rows)
    assert 0 < found["kl_vs_best_kvpress_at_25pct"] < 0.1
    assert found["best_kvpress_at_25pct"].startswith("kvpress ")
    assert found["texts"] == 1 and "kl_vs_best_kvpress_at_50pct" not in found
    assert found["arms"]["ours at 25%"]["perplexity_vs_exact"] == pytest.approx(1.0, abs=0.1)


def test_contexts_without_a_side_do_not_count(context: Context) -> None:
    rows = [judge(context.case, OURS, 0.25, 0.25, context.exact, context.exact)]
    assert figures(rows)["texts"] == 0

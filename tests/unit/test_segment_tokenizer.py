"""Tokens from kept segments are those of the whole text, for every kind of tokenizer."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from headrace_decode.rendering import segment_tokenizer
from headrace_decode.rendering.segment_tokenizer import (
    MAX_TOKEN_CHARS,
    SegmentTokenizer,
    longest_of,
)

CORPUS = [
    "the quick brown fox  jumps over 12 lazy dogs, isn't it?\n\n",
    "élan ▁ naïve 東京 x=1.5;",
] * 20
SPECIAL = ["<s>", "</s>", "<|start|>", "<|start|>user", "<|end|>"]


def byte_level(**kind: Any) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **kind)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL))
    return made


def spaces(scheme: str) -> Tokenizer:
    """BPE over words with a mark for spaces, as Llama 2 and Mistral have it."""
    made = Tokenizer(models.BPE(unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL))
    return made


def prepended() -> Tokenizer:
    """The mark added by a normaliser, as older files of Llama 2 have it."""
    made = Tokenizer(models.BPE(unk_token="<s>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL))
    return made


def lower_case() -> Tokenizer:
    """WordPiece with a normaliser and tokens around a text, as BERT has it."""
    made = Tokenizer(models.WordPiece(unk_token="<s>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL)
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return made


def with_odd_tokens() -> Tokenizer:
    """Added tokens that absorb spaces, need a border of a word, or overlap a message's begin."""
    made = byte_level()
    made.add_tokens(
        [
            AddedToken("<|pad|>", lstrip=True, normalized=False, special=True),
            AddedToken("<|gap|>", rstrip=True, normalized=False, special=True),
            AddedToken("fox", single_word=True, normalized=False),
            AddedToken("x<|sta", normalized=False),
            AddedToken("Dogs", normalized=True),
        ]
    )
    return made


KINDS = {
    "bytes": byte_level(),
    "bytes without a pattern": byte_level(use_regex=False),
    "spaces always": spaces("always"),
    "spaces first": spaces("first"),
    "spaces never": spaces("never"),
    "prepended": prepended(),
    "lower case": lower_case(),
    "odd tokens": with_odd_tokens(),
}


class Counting:
    """A tokenizer that counts the characters of its texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.chars = tokenizer, 0

    def __call__(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        self.chars += len(text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def made(kind: str | Tokenizer) -> tuple[Counting, SegmentTokenizer]:
    tokenizer = KINDS[kind] if isinstance(kind, str) else kind
    encode = Counting(tokenizer)
    result = SegmentTokenizer(encode, tokenizer.get_added_tokens_decoder())
    encode.chars = 0
    return encode, result


def cuts_texts(encode: Counting, tokenizer: SegmentTokenizer) -> bool:
    """Whether a text that grows at a special token costs its end only."""
    text = "a b " * segment_tokenizer.SEGMENT_CHARS
    for more in ("<|start|>", "<|start|>a"):
        encode.chars = 0
        tokenizer.token_ids(text + more, False, "a tenant of its own")
    return encode.chars < len(text)


def text_of(rng: random.Random, pieces: int) -> str:
    odd = ["<|pad|>", "<|gap|>", "fox", "x<|sta", "Dogs", "<|sta", "rt|>", "|>", "<", "user"]
    plain = ["the", " quick", "  ", " ", "\n\n", "'s", "12", ".", "é", "東", "▁", "_", "a" * 30]
    return "".join(rng.choices([*SPECIAL, *odd, *plain], k=pieces))


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_whole_text(
    kind: str, framed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_tokenizer, "SEGMENT_CHARS", 10)
    encode, tokenizer = made(kind)
    assert cuts_texts(encode, tokenizer)
    rng = random.Random(kind)
    for pieces in range(150):
        text = text_of(rng, pieces)
        whole = encode(text, framed)
        assert tokenizer.token_ids(text, framed, "a") == whole
        more = text + text_of(rng, 20)
        assert tokenizer.token_ids(more, framed, "a") == encode(more, framed)


@pytest.mark.parametrize("text", ["<unused", "<unused59", "<", "<|", "<unused5>", "a"])
def test_a_text_costs_little_however_many_added_tokens_there_are(text: str) -> None:
    tokens = [f"<unused{number}>" for number in range(6000)]
    pattern = re.compile(longest_of(tokens))
    text *= 200_000 // len(text)
    began_s = time.thread_time()
    found = sum(1 for _ in pattern.finditer(text))
    assert time.thread_time() - began_s < 0.5  # a plain alternation takes 6 s
    assert found == text.count("<unused5>")


def test_the_pattern_finds_the_leftmost_token_and_the_longest_there() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tokens = {"".join(rng.choices("ab<.", k=rng.randint(1, 5))) for _ in range(8)}
        text = "".join(rng.choices("ab<.", k=60))
        plain = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
        assert re.findall(longest_of(tokens), text) == plain.findall(text)


def test_a_turn_costs_its_own_text_and_a_segment_at_most() -> None:
    encode, tokenizer = made("bytes")
    size = segment_tokenizer.SEGMENT_CHARS
    turn = "<|start|>" + "a b " * (size // 8) + "<|end|>"
    for turns in range(1, 20):
        encode.chars = 0
        tokenizer.token_ids(turn * turns, False, None)
        assert encode.chars <= 2 * size + 2 * len(turn)
        encode.chars = 0
        tokenizer.token_ids(turn * turns, False, None)
        assert encode.chars == 0


def test_tenants_share_no_tokens() -> None:
    encode, tokenizer = made("bytes")
    for owner in ("a", "b", None, "None"):
        encode.chars = 0
        tokenizer.token_ids("some text", False, owner)
        assert encode.chars == len("some text")


def test_memory_is_bounded_and_the_oldest_segments_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    max_bytes = 3 * (segment_tokenizer.ENTRY_BYTES + 4)
    monkeypatch.setattr(segment_tokenizer, "MAX_KEPT_BYTES", max_bytes)
    encode, tokenizer = made("bytes")
    for text in ("a", "b", "c", "a", "d"):
        tokenizer.token_ids(text, False, None)
    assert tokenizer.kept_bytes <= max_bytes
    encode.chars = 0
    for text in ("a", "d", "c"):
        tokenizer.token_ids(text, False, None)
    assert encode.chars == 0
    tokenizer.token_ids("b", False, None)
    assert encode.chars == 1
    tokenizer.token_ids("a b c " * 1000, False, None)  # larger than the memory
    assert tokenizer.kept_bytes <= max_bytes


def test_a_tokenizer_that_breaks_the_rule_gets_whole_texts() -> None:
    tokenizer = KINDS["bytes"]

    class Odd(Counting):
        def __call__(self, text: str, add_special_tokens: bool) -> Sequence[int]:
            return super().__call__(text.replace(" <|start|>", "<|start|>"), add_special_tokens)

    encode = Odd(tokenizer)
    result = SegmentTokenizer(encode, tokenizer.get_added_tokens_decoder())
    assert not cuts_texts(encode, result)
    text = "a <|start|>b" * 3000
    assert result.token_ids(text, False, None) == encode(text, False)


def test_a_tokenizer_that_does_not_match_special_tokens_gets_whole_texts() -> None:
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True
    assert not cuts_texts(*made(tokenizer))


def test_a_tokenizer_with_a_very_long_added_token_gets_whole_texts() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<" + "x" * MAX_TOKEN_CHARS, normalized=False)])
    assert not cuts_texts(*made(tokenizer))


def test_other_kinds_of_tokenizers_get_whole_texts() -> None:
    encode = Counting(KINDS["bytes"])
    result = SegmentTokenizer(encode, {})
    assert not cuts_texts(encode, result)
    assert result.token_ids("<|start|>a", True, None) == encode("<|start|>a", True)

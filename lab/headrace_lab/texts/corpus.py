"""Token streams for training and validation, cut from files of text.

A file is either for training or for validation. A text that occurs twice is used once. Texts follow
one another with an end token between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_lab.texts.prompts import documents, passage

END = "<|endoftext|>"
END_TOKEN = 0
LEARNED_BYTES = 16_000_000
"""Maximum size of the text that the vocabulary is learned from, counted in characters."""
VALIDATING = 20
"""One in this many of a folder's files is for validation."""
MAX_CHARACTERS = 8
"""Maximum number of characters of a file that are encoded for each wanted token."""

Tokens = NDArray[np.uint32]


class CorpusError(ValueError):
    """There is too little text; the message says how much there is."""


def sides(folder: Path | None) -> tuple[list[Path], list[Path]]:
    """Return the files for training and for validation: of a folder, or of the installed packages.

    A package is on one side only. The order is that of a hash, so it mixes kinds of text.
    """
    if folder is None:
        return documents(False), documents(True)
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=_place)
    cut = -(-len(files) // VALIDATING)
    return files[cut:], files[:cut]


def learn_vocabulary(files: Sequence[Path], size: int) -> Tokenizer:
    """Learn a byte-level BPE tokenizer with `size` tokens. Token 0 is `END`.

    It can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_most(texts(files, set()), LEARNED_BYTES), trainer)
    return tokenizer


def texts(files: Sequence[Path], seen: set[bytes]) -> Iterator[str]:
    """Yield the files' texts whose digests are not in `seen`, and add their digests to it."""
    for file in files:
        text = file.read_text("utf-8", errors="replace")
        digest = hashlib.sha256(text.encode()).digest()
        if text and digest not in seen:
            seen.add(digest)
            yield text


def stream(tokenizer: Tokenizer, files: Sequence[Path], tokens: int, seen: set[bytes]) -> Tokens:
    """Return the first `tokens` tokens of the files' texts.

    Args:
        seen: digests of texts that were used before and are not used again.

    Raises:
        CorpusError: the texts have fewer tokens.
    """
    parts, count = [], 0
    for text in texts(files, seen):
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        parts.append(np.array([*encoded, END_TOKEN], np.uint32))
        count += len(parts[-1])
        if count >= tokens:
            return np.concatenate(parts)[:tokens]
    raise CorpusError(f"the texts have {count} tokens, and {tokens} are needed: give more texts")


def passages(
    encode: Callable[[str], list[int]], files: Sequence[Path], count: int, tokens: int
) -> Tokens:
    """Return [count, tokens]: `tokens` tokens of each of `count` files, from a random line on.

    Raises:
        CorpusError: too few files have as many tokens.
    """
    found: list[list[int]] = []
    left, rng = iter(files), np.random.default_rng(0)
    while len(found) < count:
        try:
            text = passage(left, rng)
        except StopIteration:
            raise CorpusError(
                f"{len(found)} texts have {tokens} tokens, and {count} are needed: give more texts"
            ) from None
        encoded = encode(text[: MAX_CHARACTERS * tokens])[:tokens]
        if len(encoded) == tokens:
            found.append(encoded)
    return np.array(found, np.uint32)


def _most(texts: Iterator[str], size: int) -> Iterator[str]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


def _place(file: Path) -> bytes:
    return hashlib.sha256(file.name.encode()).digest()

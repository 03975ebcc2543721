"""Tokenises a long text from segments of it that were tokenised before.

A gateway has a replica tokenise a prompt for its plan, and then sends the request, which is
tokenised again; each turn of a conversation repeats all turns before it. A text is therefore cut
into segments, and the tokens of the latest segments are kept. A segment begins at a special token,
such as the one that begins a message, and has at least `SEGMENT_CHARS` characters. Cutting goes
from the text's beginning, so texts that begin alike have the same first segments.

Tokenizers of Hugging Face's `tokenizers` find added tokens first, and then normalise and tokenise
the texts between them independently. A text is cut only at special tokens for which this rule holds
without exception: they match the raw text, absorb no spaces to their left, need no border of a
word, and begin with no character of a word. A tokenizer that fails a check of the rule at the start
gets whole texts, and so do tokenizers of other kinds. Only the tokens of equal texts are then kept.

Tenants share no kept tokens, because the time of a request would tell what others asked.

Pure: no engine, no I/O.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import starmap
from typing import Protocol

SEGMENT_CHARS = 8_192
"""Minimum number of characters of a segment that another one follows. Tokenising so many takes
about 6 ms, and a call of the tokenizer 0.1 ms."""
MAX_KEPT_BYTES = 64 * 2**20
"""Memory for the tokens of segments: about 16 million tokens."""
ENTRY_BYTES = 256
"""Memory of a kept segment beside its tokens."""
MAX_TOKEN_CHARS = 256
"""Maximum length of an added token; texts of a tokenizer with a longer one are not cut."""
MAX_CHECKED = 8
"""Number of special tokens with which the rule is checked at the start; there may be hundreds."""
_PROBES = ("", " ", "word", " two words ", "\n\n", "1.5", "'s", "é", "  x", "▁")

Encode = Callable[[str, bool], Sequence[int]]
"""(text, add special tokens) -> the text's token ids, by the tokenizer itself."""


class AddedToken(Protocol):
    """The part of a tokenizer's added token that is read here; see `tokenizers.AddedToken`."""

    content: str
    special: bool
    normalized: bool
    lstrip: bool
    single_word: bool


class SegmentTokenizer:
    """A tokenizer that keeps the tokens of segments. Use it from one thread.

    Args:
        encode: the tokenizer.
        added_tokens: the tokenizer's added tokens by id; empty if it is none of `tokenizers`.
    """

    def __init__(self, encode: Encode, added_tokens: Mapping[int, AddedToken]) -> None:
        self._encode = encode
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self.kept_bytes = 0
        raw = {each.content for each in added_tokens.values() if not each.normalized}
        ids = {each.content: i for i, each in added_tokens.items() if _is_boundary(each)}
        if max(map(len, raw), default=0) > MAX_TOKEN_CHARS:
            raw, ids = set(), {}
        # Like the tokenizer: the leftmost token, and the longest that begins there.
        self._added = re.compile(longest_of(raw))
        self._boundaries: Collection[str] = ids.keys()
        self._frame = self._find_frame()
        if self._frame is None or not all(starmap(self._holds, sorted(ids.items())[:MAX_CHECKED])):
            self._boundaries = ()

    def token_ids(self, text: str, add_special_tokens: bool, owner: str | None) -> list[int]:
        """Return the same token ids as the tokenizer.

        Args:
            text: the text.
            add_special_tokens: whether the tokenizer adds its special tokens around the text.
            owner: the tenant, whose kept tokens are used; None if there are no tenants.
        """
        if not self._boundaries or self._frame is None:
            return list(self._ids_of(text, add_special_tokens, owner))
        before, after = self._frame if add_special_tokens else ((), ())
        ids = list(before)
        for segment in self._segments(text):
            ids.extend(self._ids_of(segment, False, owner))
        ids.extend(after)
        return ids

    def _segments(self, text: str) -> Iterator[str]:
        start = 0
        for at in self._places(text):
            if at - start >= SEGMENT_CHARS:
                yield text[start:at]
                start = at
        yield text[start:]

    def _places(self, text: str) -> Iterator[int]:
        """Yield the places at which a text may be cut."""
        for found in self._added.finditer(text):
            if found[0] in self._boundaries:
                yield found.start()

    def _ids_of(self, text: str, add_special_tokens: bool, owner: str | None) -> Sequence[int]:
        """Return the token ids of a segment, and keep them."""
        digest = blake2b(repr((owner, add_special_tokens)).encode(), digest_size=32)
        digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
        key = digest.digest()
        ids = self._kept.get(key)
        if ids is not None:
            self._kept.move_to_end(key)
            return ids
        ids = array("i", self._encode(text, add_special_tokens))
        size = _size(ids)
        if size <= MAX_KEPT_BYTES:
            self._kept[key] = ids
            self.kept_bytes += size
            while self.kept_bytes > MAX_KEPT_BYTES:
                self.kept_bytes -= _size(self._kept.popitem(last=False)[1])
        return ids

    def _find_frame(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return the special tokens that go before and after a text; None if that is unclear."""
        for probe in ("word", "a"):
            plain, framed = list(self._encode(probe, False)), list(self._encode(probe, True))
            places = [
                at
                for at in range(len(framed) - len(plain) + 1)
                if framed[at : at + len(plain)] == plain
            ]
            if plain and len(places) == 1:
                return framed[: places[0]], framed[places[0] + len(plain) :]
        return None

    def _holds(self, token: str, token_id: int) -> bool:
        """Return whether texts with this token are tokenised like their two parts."""
        for number, left in enumerate(_PROBES):
            for right in (_PROBES[-1 - number], _PROBES[number]):
                if len(left) not in self._places(left + token + right):
                    continue  # an added token that begins further left contains the place
                whole = list(self._encode(left + token + right, False))
                first = list(self._encode(left, False))
                second = list(self._encode(token + right, False))
                if second[:1] != [token_id] or whole != first + second:
                    return False
        return True


def longest_of(tokens: Iterable[str]) -> str:
    """Return a regular expression for the longest token that begins at a place.

    It branches by character, so a place costs the same for six thousand tokens as for a few. A
    plain alternation of Gemma's took 6 s for 220,000 characters, and held the interpreter.
    """
    rests: dict[str, list[str]] = {}
    ends = False
    for token in tokens:
        if token:
            rests.setdefault(token[0], []).append(token[1:])
        else:
            ends = True
    branches = [re.escape(first) + longest_of(each) for first, each in rests.items()]
    if not branches or (len(branches) == 1 and not ends):
        return "".join(branches)
    return f"(?:{'|'.join(branches)})" + "?" * ends


def _is_boundary(token: AddedToken) -> bool:
    """Return whether a text may be cut before this token."""
    return (
        token.special
        and not (token.normalized or token.lstrip or token.single_word)
        and bool(token.content)
        and not (token.content[0].isalnum() or token.content[0] == "_")
        and not token.content[0].isspace()
    )


def _size(ids: array[int]) -> int:
    return ids.itemsize * len(ids) + ENTRY_BYTES

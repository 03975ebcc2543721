"""Loads the texts of an operator's corpus into the engine's memory, part after part.

A corpus comes in numbered parts of a few megabytes. Each is tokenised here, in a thread, and handed
to the engine in portions that fit between its steps (`retrieval.corpus_manager` is the
engine's side). All replicas receive the same parts and cut them in the same way. A replica that
missed a part refuses the rest and the flip. If replicas share their memories, it receives the
corpus from the other replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

Tokenize = Callable[[list[str]], list[list[int]]]
SendCommand = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]
"""Function that sends a command to the engine's memory; the answer is None without a memory."""

PIECE_CHARS = 16_384
"""Length above which a text becomes several documents; the memory's segments have about the same
length."""
PIECES_AT_ONCE = 16
PORTION_TOKENS = 16_384
SPARE_TOKENS = 16
"""Maximum memory, in tokens, that a document takes besides its own tokens."""


@dataclass
class _Upload:
    version: int
    parts: int
    tokens: int = field(default=0, compare=False)


class CorpusLoader:
    """The uploads in progress at one replica."""

    def __init__(self, tokenize: Tokenize, send_command: SendCommand) -> None:
        """Args:
        tokenize: returns token ids of texts. It blocks, so it is called in a thread, one call at a
            time.
        send_command: sends a command to the engine's memory.
        """
        self._tokenize, self._send_command = tokenize, send_command
        self._uploads: dict[tuple[str | None, str], _Upload] = {}
        self._lock = asyncio.Lock()

    async def command(self, command: dict[str, Any], own_id: str) -> dict[str, Any] | None:
        """Carry out a command of the gateway; return None if the engine has no memory.

        Args:
            command: `do` is "part" (with the arguments of `part`) or "flip" (`corpus`, `tenant`,
                `version` and `teller`, the id of the replica that sends the corpus to later ones).
                Any other command goes to the engine unchanged.
            own_id: this replica's id.
        """
        arguments = {key: value for key, value in command.items() if key != "do"}
        async with self._lock:
            if command["do"] == "part":
                return await self.part(**arguments)
            if command["do"] == "flip":
                replicate = arguments.pop("teller") == own_id
                return await self._flip(**arguments, replicate=replicate)
            return await self._send_command(command)

    async def part(
        self,
        corpus: str,
        version: int,
        part: int,
        texts: list[str],
        tenant: str | None = None,
        ttl_s: float | None = None,
        total_chars: int = 0,
    ) -> dict[str, Any] | None:
        """Load one part of a version.

        Args:
            part: number of the part, from 0; parts come in order.
            total_chars: approximate length of all texts of all parts; 0 if unknown.

        Returns:
            `tokens` of this version so far; or `error`, and then the version is discarded.
        """
        names = {"corpus": corpus, "tenant": tenant, "version": version}
        key = (tenant, corpus)
        if part > 0 and self._uploads.get(key, None) != _Upload(version, part):
            return {"error": _missed(corpus, version, part)}
        documents = await self._tokenized(texts)
        if part == 0:
            chars = sum(map(len, texts))
            share = max(total_chars / chars, 1.0) if chars else 1.0
            answer = await self._send_command(
                {"do": "begin", **names, "tokens": int(share * _room(documents))}
            )
            if answer is None or "error" in answer:
                return answer
            self._uploads[key] = _Upload(version, 0)
        upload = self._uploads[key]
        for portion in portions(documents):
            answer = await self._put(portion, {**names, "ttl_s": ttl_s})
            if answer is None or "error" in answer:
                self._uploads.pop(key)
                return answer
            upload.tokens += answer["tokens"]
        upload.parts += 1
        return {"tokens": upload.tokens}

    async def _flip(
        self, corpus: str, version: int, tenant: str | None, replicate: bool
    ) -> dict[str, Any] | None:
        upload = self._uploads.get((tenant, corpus))
        if upload is None or upload.version != version:
            return {"error": _missed(corpus, version, -1)}
        self._uploads.pop((tenant, corpus))
        names = {"corpus": corpus, "tenant": tenant, "version": version}
        return await self._send_command(
            {"do": "activate", **names, "tokens": upload.tokens, "replicate": replicate}
        )

    async def _put(self, portion: list[list[int]], common: dict[str, Any]) -> dict[str, Any] | None:
        """Load one portion, in as many calls as the engine needs."""
        tokens = 0
        while portion:
            answer = await self._send_command({"do": "load", **common, "sequences": portion})
            if answer is None or "error" in answer:
                return answer
            tokens += answer["tokens"]
            portion = portion[answer["taken"] :]
        return {"tokens": tokens}

    async def _tokenized(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise texts a few pieces at a time, so that other threads can run in between."""
        documents: list[list[int]] = []
        cut = (piece for text in texts for piece in pieces(text))
        while some := list(islice(cut, PIECES_AT_ONCE)):
            documents += await asyncio.to_thread(self._tokenize, some)
        return documents


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most PIECE_CHARS, cut after a line's end where there is one."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def portions(documents: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Yield documents in runs of about PORTION_TOKENS."""
    run: list[list[int]] = []
    size = 0
    for document in documents:
        run.append(document)
        size += len(document)
        if size >= PORTION_TOKENS:
            yield run
            run, size = [], 0
    if run:
        yield run


def _room(documents: Sequence[list[int]]) -> int:
    return sum(len(document) + SPARE_TOKENS for document in documents)


def _missed(corpus: str, version: int, part: int) -> str:
    which = f"part {part} of version" if part >= 0 else "version"
    return (
        f"{which} {version} of corpus {corpus!r} is not the next one here: begin again with "
        "part 0 and no version"
    )

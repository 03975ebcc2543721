"""Manages the corpora of a memory, and loads them in portions that fit between engine steps.

A version is begun, loaded portion by portion beside the one in force, and takes over at its
activation if it is complete by then: no request uses half a corpus. Versions only grow. Dropping a
corpus is the activation of a version without segments.

Commands and answers are JSON-able; an invalid command is answered with `error`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.retrieval.draft_memory import DraftMemory, corpus_key
from headrace_decode.speculative.retrieval.layout import NONE

MAX_CALL_S = 0.005
"""Approximate maximum time of a call, in seconds; the rest of a portion is for the next call."""


class CorpusManager:
    """The corpora of one memory; at most one version of each is being loaded."""

    def __init__(self, memory: DraftMemory, timer: Callable[[], float] = time.perf_counter) -> None:
        self.memory, self._timer = memory, timer
        self._loading: dict[int, int] = {}
        self._commands: dict[str, Callable[..., dict[str, Any]]] = {
            "list": self.listing,
            "begin": self.begin,
            "load": self.load,
            "activate": self.activate,
            "drop": self.drop,
        }

    def command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run `command["do"]`, the name of a command, with the other entries as arguments.

        After an answer with `error`, nothing was changed except as the text says.
        """
        arguments = dict(command)
        wanted = self._commands.get(str(arguments.pop("do", None)))
        if wanted is None:
            return {"error": f"memory: do must be one of {', '.join(self._commands)}"}
        try:
            with self.memory.lock:
                return wanted(**arguments)
        except (TypeError, ValueError) as error:
            return {"error": str(error)}

    def listing(self) -> dict[str, Any]:
        """Return `corpora`, each with its version in force and the held tokens, and `stats`."""
        headers, found = self.memory.pool.headers, []
        rows = np.flatnonzero((headers["partition"] != NONE) & (headers["corpus"] != 0))
        for number in np.unique(headers["corpus"][rows]).tolist():
            found.append(self._describe(number, rows[headers["corpus"][rows] == number]))
        return {
            "corpora": [each for each in found if each["segments"] or each["loading_tokens"]],
            "stats": self.memory.stats(),
        }

    def begin(
        self, corpus: str, version: int, tenant: str | None = None, tokens: int = 0
    ) -> dict[str, Any]:
        """Begin to load a version; discard one that was begun and never activated.

        Args:
            corpus: name of the corpus.
            version: the new version.
            tenant: the tenant that it is for; None for all tenants.
            tokens: expected number of tokens; room for them is made at once.

        Raises:
            ValueError: corpora for all tenants are not allowed, or the version is not newer than
                the latest one.
        """
        key = corpus_key(tenant)
        if not self.memory.allows_corpora(key):
            raise ValueError(
                f"corpus {corpus!r} would be for all tenants, but speculation.corpora is false: "
                "set it to true, or name one tenant"
            )
        number = self.memory.corpus_number(key, corpus)
        newest = max(int(self.memory.pool.versions[number]), self._loading.get(number, 0))
        if not newest < version < 2**32:
            raise ValueError(f"corpus {corpus!r} has version {newest}: {version} is not above it")
        self._expire(self._rows(number, self._loading.get(number, 0)))
        self._loading[number] = version
        row = self.memory.pool.get_or_create(key)
        if row is not None and tokens > 0:
            part = self.memory.pool.parts[row]
            wanted = int(part["head"] - part["tail"]) + tokens
            self.memory.pool.grow(row, wanted, self.memory.clock())
        return {"version": version}

    def load(
        self,
        corpus: str,
        version: int,
        sequences: Sequence[Sequence[int]],
        tenant: str | None = None,
        ttl_s: float | None = None,
    ) -> dict[str, Any]:
        """Insert as many of these documents as `MAX_CALL_S` allows, at least one.

        Returns:
            `taken`, the number of documents; the caller sends the others again. `tokens`, the
            number of tokens that were kept.

        Raises:
            ValueError: this version was not begun.
        """
        self._check_loading(corpus, version, tenant)
        until, taken, tokens = self._timer() + MAX_CALL_S, 0, 0
        while taken < len(sequences) and (not taken or self._timer() < until):
            document = np.array(sequences[taken], np.int32)
            tokens += self.memory.add_to_corpus(
                corpus,
                version,
                [document],
                tenant=tenant,
                ttl_s=math.inf if ttl_s is None else ttl_s,
            )
            taken += 1
        return {"taken": taken, "tokens": tokens}

    def activate(
        self,
        corpus: str,
        version: int,
        tokens: int,
        tenant: str | None = None,
        replicate: bool = False,
    ) -> dict[str, Any]:
        """Put a loaded version in force.

        Args:
            corpus: name of the corpus.
            version: the version.
            tokens: number of tokens that were loaded; if fewer are left, the version is discarded.
            tenant: the tenant that it is for; None for all tenants.
            replicate: whether this replica shares it with replicas that start later.

        Raises:
            ValueError: this version was not begun, or is not complete.
        """
        number = self._check_loading(corpus, version, tenant)
        rows = self._rows(number, version)
        held = int(self.memory.pool.headers["tokens"][rows].sum())
        del self._loading[number]
        if held < tokens:
            self._expire(rows)
            raise ValueError(
                f"corpus {corpus!r} does not fit: {held} of its {tokens} tokens are left, and it "
                "was dropped; raise speculation.drafter_options.capacity_bytes, "
                f"{self.memory.pool.capacity_bytes} now"
            )
        self.memory.activate_corpus(corpus, version, tenant=tenant, replicate=replicate)
        return {"tokens": held}

    def drop(self, corpus: str, version: int, tenant: str | None = None) -> dict[str, Any]:
        """Stop drafting from all versions of a corpus, and free its room.

        Args:
            corpus: name of the corpus.
            version: a version above all loaded ones.
            tenant: the tenant that it is for; None for all tenants.
        """
        key = corpus_key(tenant)
        number = self.memory.corpus_names.find((key.scope, key.tenant, corpus))
        if number == 0:
            return {"dropped": False}
        rows = self._rows(number)
        live = self._describe(number, rows)
        self._loading.pop(number, None)
        self._expire(rows)
        above = max(version, int(self.memory.pool.versions[number]) + 1)
        self.memory.activate_corpus(corpus, above, tenant=tenant)
        return {"dropped": bool(live["segments"] or live["loading_tokens"])}

    def _check_loading(self, corpus: str, version: int, tenant: str | None) -> int:
        number = self.memory.corpus_number(corpus_key(tenant), corpus)
        if self._loading.get(number) != version:
            raise ValueError(
                f"version {version} of corpus {corpus!r} is not being loaded: another load began, "
                "or this replica restarted"
            )
        return number

    def _rows(self, number: int, version: int | None = None) -> NDArray[np.intp]:
        headers = self.memory.pool.headers
        mine = (headers["corpus"] == number) & (headers["partition"] != NONE)
        return np.flatnonzero(mine if version is None else mine & (headers["version"] == version))

    def _expire(self, rows: NDArray[np.intp]) -> None:
        """Mark segments as expired."""
        self.memory.pool.headers["expires_s"][rows] = 0.0

    def _describe(self, number: int, rows: NDArray[np.intp]) -> dict[str, Any]:
        memory, headers = self.memory, self.memory.pool.headers
        name = memory.corpus_names.names[number]
        assert isinstance(name, tuple)
        scope, tenant, corpus = name
        in_force = int(memory.pool.versions[number])
        live = headers[rows][headers["expires_s"][rows] > memory.clock()]
        mine = live[live["version"] == in_force]
        expires_s = float(mine["expires_s"].min(initial=math.inf))
        return {
            "corpus": corpus,
            "tenant": tenant if scope == "tenant" else None,
            "version": in_force,
            "segments": len(mine),
            "tokens": int(mine["tokens"].sum()),
            "expires_s": expires_s if math.isfinite(expires_s) else None,
            "accepted": int(mine["accepted"].sum()),
            "refused": int(mine["refused"].sum()),
            "loading_tokens": int(live["tokens"][live["version"] > in_force].sum()),
        }

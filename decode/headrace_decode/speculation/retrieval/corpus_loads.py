"""Operator corpora in a memory, in portions small enough to come between an engine's steps.

A version is begun, loaded portion by portion beside the one in force, and takes over at its flip,
if all of it is there by then: no request sees half a corpus. Versions only grow. Dropping a corpus
is a flip to a version that has nothing.

Commands and answers are JSON-able; what is wrong with a command is answered as `error`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.draft import Source
from headrace_decode.speculation.retrieval.draft_memory import Memory, corpus_key
from headrace_decode.speculation.retrieval.segments import NONE

CALL_S = 0.005
"""A portion takes about so long at most; what is left of it is for the next call."""


class Corpora:
    """The corpora of one memory. Of each, at most one version is being loaded."""

    def __init__(self, memory: Memory, timer: Callable[[], float] = time.perf_counter) -> None:
        self.memory, self._timer = memory, timer
        self._loading: dict[int, int] = {}
        self._commands: dict[str, Callable[..., dict[str, Any]]] = {
            "list": self.listing,
            "begin": self.begin,
            "load": self.load,
            "flip": self.flip,
            "drop": self.drop,
        }

    def command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out `command["do"]`, the name of a method here, with the rest as its arguments.
        An answer with `error` means that nothing was changed but what the text says."""
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
        """`corpora`, each with its version in force and what is held of it, and `stats`."""
        headers, found = self.memory.pool.headers, []
        rows = np.flatnonzero((headers["partition"] != NONE) & (headers["corpus"] != 0))
        for number in np.unique(headers["corpus"][rows]).tolist():
            found.append(self._described(number, rows[headers["corpus"][rows] == number]))
        return {
            "corpora": [each for each in found if each["segments"] or each["loading_tokens"]],
            "stats": self.memory.stats(),
        }

    def begin(
        self, corpus: str, version: int, tenant: str | None = None, tokens: int = 0
    ) -> dict[str, Any]:
        """A version is going to be loaded; one that was begun and never flipped is given up.

        Args:
            tenant: whose it is; None for all.
            tokens: how many are expected; room for them is made at once.

        Raises:
            ValueError: it is for all and that is not allowed, or not newer than what is there.
        """
        key = corpus_key(tenant)
        if not self.memory.may_hold(key, Source.OPERATOR):
            raise ValueError(
                f"corpus {corpus!r} would be for all tenants, but speculation.corpora is false: "
                "set it to true, or name one tenant"
            )
        number = self.memory.corpus_number(key, corpus)
        newest = max(int(self.memory.pool.versions[number]), self._loading.get(number, 0))
        if not newest < version < 2**32:
            raise ValueError(f"corpus {corpus!r} has version {newest}: {version} is not above it")
        self._forget(self._rows(number, self._loading.get(number, 0)))
        self._loading[number] = version
        row = self.memory.pool.keep(key)
        if row is not None and tokens > 0:
            part = self.memory.pool.parts[row]
            wanted = int(part["head"] - part["tail"]) + tokens
            self.memory.pool.widen(row, wanted, self.memory.clock())
        return {"version": version}

    def load(
        self,
        corpus: str,
        version: int,
        sequences: Sequence[Sequence[int]],
        tenant: str | None = None,
        ttl_s: float | None = None,
    ) -> dict[str, Any]:
        """Put in as many of these documents as the time allows, at least one.

        Returns:
            `taken`, how many; the caller sends the others again. `tokens`, how many were kept.

        Raises:
            ValueError: this version was not begun.
        """
        self._check_loading(corpus, version, tenant)
        until, taken, tokens = self._timer() + CALL_S, 0, 0
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

    def flip(
        self, corpus: str, version: int, tokens: int, tenant: str | None = None, tell: bool = False
    ) -> dict[str, Any]:
        """Put a loaded version in force.

        Args:
            tokens: how many were loaded; with fewer left of them the version is given up.
            tell: whether this replica shares it with those that start later.

        Raises:
            ValueError: this version was not begun, or is not whole.
        """
        number = self._check_loading(corpus, version, tenant)
        rows = self._rows(number, version)
        held = int(self.memory.pool.headers["tokens"][rows].sum())
        del self._loading[number]
        if held < tokens:
            self._forget(rows)
            raise ValueError(
                f"corpus {corpus!r} does not fit: {held} of its {tokens} tokens are left, and it "
                "was given up; raise speculation.drafter_options.capacity_bytes, "
                f"{self.memory.pool.capacity_bytes} now"
            )
        self.memory.flip(corpus, version, tenant=tenant, tell=tell)
        return {"tokens": held}

    def drop(self, corpus: str, version: int, tenant: str | None = None) -> dict[str, Any]:
        """Draft from a corpus no more, whichever version; its room is free for others from now on.

        Args:
            version: above all that were loaded.
        """
        key = corpus_key(tenant)
        number = self.memory.corpora.find((key.scope, key.tenant, corpus))
        if number == 0:
            return {"dropped": False}
        rows = self._rows(number)
        live = self._described(number, rows)
        self._loading.pop(number, None)
        self._forget(rows)
        above = max(version, int(self.memory.pool.versions[number]) + 1)
        self.memory.flip(corpus, above, tenant=tenant)
        return {"dropped": bool(live["segments"] or live["loading_tokens"])}

    def _check_loading(self, corpus: str, version: int, tenant: str | None) -> int:
        number = self.memory.corpus_number(corpus_key(tenant), corpus)
        if self._loading.get(number) != version:
            raise ValueError(
                f"version {version} of corpus {corpus!r} is not being loaded: another began "
                "meanwhile, or this replica has started anew"
            )
        return number

    def _rows(self, number: int, version: int | None = None) -> NDArray[np.intp]:
        headers = self.memory.pool.headers
        mine = (headers["corpus"] == number) & (headers["partition"] != NONE)
        return np.flatnonzero(mine if version is None else mine & (headers["version"] == version))

    def _forget(self, rows: NDArray[np.intp]) -> None:
        """Void segments: they count as expired."""
        self.memory.pool.headers["expires_s"][rows] = 0.0

    def _described(self, number: int, rows: NDArray[np.intp]) -> dict[str, Any]:
        memory, headers = self.memory, self.memory.pool.headers
        name = memory.corpora.names[number]
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

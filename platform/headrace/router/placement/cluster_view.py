"""View of the cluster for placement: engines, nodes, links and fits, as arrays.

The view decides nothing and learns nothing. Its owner writes into it: a gateway from reports and
reservations, a decode replica from its own measurements, the simulator from its model.
`place.place` reads it.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.router.placement.arrays import ENGINE
from headrace.router.placement.pair_search import ELSEWHERE, WITHIN
from headrace.router.placement.pricing import queue_s
from headrace.router.plan import RouterSettings
from headrace_engine.kv_groups import BlockUse
from headrace_engine.step_time import KNOTS, StepTime
from headrace_kvstore.lookup.availability import MEDIA

Role = Literal["prefill", "decode"]
_FIXED_S, _BYTE_S = 0.005, 1e-9
"""Cost of a transfer or a load before the first measurement: 5 ms and 1 GB/s."""
_DRIFT_S = 3.0
"""Time over which `drift` is a mean, however many of the reports of that time are read."""
_CALL_S, _CALL_ERROR_S = 0.020, 0.050
_HANDOFF_S, _HANDOFF_ERROR_S = 0.005, 0.050


def name_key(name: str) -> int:
    """Return a 64-bit hash of a name, the same in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class ClusterView:
    """The cluster as one caller knows it. Not thread-safe.

    Attributes:
        engines: ENGINE [rows]. The caller writes `running`, `context`, `prompts`, `free_blocks`,
            `drift`, `measured_s`, `cold`, `call_s`, `handoff_s` and their errors
            directly, in the units of ENGINE. Methods set fields that belong together.
        settings: the router's settings.
        prefill_name: name of the prefill deployment.
        no_prefill: why no prefill engine may be asked; used only if none may.
    """

    def __init__(
        self,
        block_tokens: int,
        token_bytes: float,
        settings: RouterSettings | None = None,
        *,
        prefill_name: str = "prefill",
    ) -> None:
        """
        Args:
            block_tokens: tokens of a KV block.
            token_bytes: KV bytes of a token.

        Raises:
            ValueError: one of these is not above 0.
        """
        if not (block_tokens >= 1 and token_bytes > 0):
            raise ValueError("block_tokens and token_bytes must be above 0")
        self.block_tokens, self.token_bytes = block_tokens, token_bytes
        self.settings = settings or RouterSettings()
        self.prefill_name, self.no_prefill = prefill_name, "no prefill replica runs"
        self._size = 0
        self._engines = np.zeros(0, ENGINE)
        self._curves = np.zeros((0, len(KNOTS)))
        self._padded = np.full((0, 1), np.inf)
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._nodes: dict[str, int] = {}
        self._free_nodes: list[int] = []
        self.loads = np.zeros((0, len(MEDIA), 2))
        self.fits = np.array([(_FIXED_S, _BYTE_S, 0.2) for _ in (ELSEWHERE, WITHIN)])

    # ---- nodes and transfers --------------------------------------------------------------

    def node(self, name: str) -> int:
        """Return the node of this name, adding it if it is new."""
        at = self._nodes.get(name)
        if at is None:
            if self._free_nodes:
                at = self._free_nodes.pop()
            else:
                at = len(self.loads)
                self.loads = np.concatenate([self.loads, np.empty((1, len(MEDIA), 2))])
            self._nodes[name] = at
            self.loads[at] = _FIXED_S, _BYTE_S
        return at

    def remove_node(self, name: str) -> None:
        """Remove a node without engines; a later node may get its index."""
        self._free_nodes.append(self._nodes.pop(name))

    def set_load(self, node: int, medium: str, fixed_s: float, byte_s: float) -> None:
        """Set the seconds to load from a medium of a node's store."""
        self.loads[node, MEDIA.index(medium)] = fixed_s, byte_s

    def set_fit(self, link: int, fixed_s: float, byte_s: float, error: float) -> None:
        """Set the seconds to move KV and their relative error.

        Args:
            link: `ELSEWHERE` for moves between nodes, `WITHIN` for moves within a node.
        """
        self.fits[link] = fixed_s, byte_s, error

    # ---- engines --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    @property
    def engines(self) -> NDArray[np.void]:
        return self._engines[: self._size]

    @property
    def curves(self) -> NDArray[np.float64]:
        return self._curves[: self._size]

    @property
    def padded(self) -> NDArray[np.float64]:
        return self._padded[: self._size]

    def row(self, name: str) -> int:
        """Return an engine's row in `engines`.

        Raises:
            KeyError: there is none of this name.
        """
        return self._rows[name]

    @property
    def names(self) -> list[str]:
        """Names of all engines."""
        return list(self._rows)

    def name(self, row: int) -> str:
        return self._names[row]

    def add(
        self, name: str, role: Role, node: int, *, hbm: int = -1, step_tokens: int = 2048
    ) -> int:
        """Add an engine: a replica, or one data-parallel rank of it.

        It starts without queued or running requests, and with the prior's step times.

        Args:
            name: unique name, the same for all callers.
            hbm: holder of its prefix cache; -1 if nothing is known of it.
            step_tokens: token budget of its steps.

        Returns:
            Its row, which stays the same until `remove`; then another engine may get it.

        Raises:
            ValueError: the name is taken, there is no such node, or the budget is below 1.
        """
        if name in self._rows:
            raise ValueError(f"there is an engine named {name!r} already")
        if not 0 <= node < len(self.loads) or step_tokens < 1:
            raise ValueError("an engine needs a node of this view and a budget of at least 1 token")
        if self._free:
            row = self._free.pop()
        else:
            row, self._size = self._size, self._size + 1
            if row == len(self._engines):
                self._grow(max(8, 2 * row), self._padded.shape[1])
            self._names.append("")
        self._rows[name], self._names[row] = row, name
        engine = self._engines[row]
        self._engines[row] = np.zeros((), ENGINE)
        engine["key"], engine["node"], engine["hbm"] = name_key(name), node, hbm
        engine["step_tokens"], engine["free_blocks"], engine[role] = step_tokens, -1, True
        engine["cold"], engine["reported_s"] = role == "prefill", -math.inf
        engine["measured_s"] = math.inf
        self.set_block_use(row, BlockUse())
        engine["call_s"], engine["call_error_s"] = _CALL_S, _CALL_ERROR_S
        engine["handoff_s"], engine["handoff_error_s"] = _HANDOFF_S, _HANDOFF_ERROR_S
        self.set_steps(row, StepTime())
        return row

    def remove(self, name: str) -> None:
        """Remove an engine."""
        row = self._rows.pop(name)
        self._names[row], self._engines[row] = "", np.zeros((), ENGINE)
        self._free.append(row)

    def set_steps(self, row: int, fit: StepTime) -> None:
        """Set an engine's step times. Call this again when the fit has learned."""
        prices, sizes = fit.prices(), fit.padded_sizes
        if len(sizes) > self._padded.shape[1]:
            self._grow(len(self._engines), len(sizes))
        engine = self._engines[row]
        self._curves[row] = prices.plain
        self._padded[row] = np.inf
        self._padded[row, : len(sizes)] = sizes
        engine["context_s"], engine["pair_s"] = prices.context_s, prices.pair_s
        engine["weight"], engine["step_error"] = prices.weight, fit.relative_error

    def set_block_use(self, row: int, use: BlockUse) -> None:
        """Set the blocks that a request takes on an engine."""
        for name in BlockUse.__struct_fields__:
            self._engines[row][name] = getattr(use, name)

    def set_queue(
        self, row: int, tokens: int, pairs: float, now_s: float, *, is_report: bool = True
    ) -> None:
        """Set the prompt tokens ahead of a new request on an engine, and their attention pairs.

        The engine is assumed to compute them from now on. Call this after `set_steps`.

        Args:
            is_report: the values come from the engine's own report. `drift` then learns from the
                difference to the expected queue, relative to the age of the last report.
        """
        engine = self._engines[row]
        age_s = now_s - float(engine["reported_s"])
        expected_s = max(0.0, float(engine["queue_s"] - max(0.0, now_s - engine["at_s"])))
        engine["queued_tokens"], engine["queued_pairs"] = tokens, pairs
        engine["queue_s"] = queue_s(engine, self._curves, self._padded, row) if tokens > 0 else 0.0
        engine["at_s"] = now_s
        if is_report:
            if engine["reported_s"] > -math.inf and age_s > 0.0:
                error = float(engine["queue_s"]) - expected_s
                weight = -math.expm1(-age_s / _DRIFT_S)
                engine["drift"] += weight * (error * error / age_s - engine["drift"])
            engine["reported_s"] = now_s

    def reserve(self, row: int, tokens: int, pairs: float, now_s: float) -> None:
        """Add a prompt that was sent to an engine; negative tokens remove a prompt again."""
        engine = self._engines[row]
        left = 0.0
        if engine["queue_s"] > 0:
            left = max(0.0, 1.0 - max(0.0, now_s - engine["at_s"]) / engine["queue_s"])
        ahead = max(0, round(left * engine["queued_tokens"]) + tokens)
        self.set_queue(
            row, ahead, max(0.0, left * engine["queued_pairs"] + pairs), now_s, is_report=False
        )

    def _grow(self, rows: int, padded: int) -> None:
        engines, curves = np.zeros(rows, ENGINE), np.zeros((rows, len(KNOTS)))
        sizes = np.full((rows, padded), np.inf)
        engines[: len(self._engines)], curves[: len(self._curves)] = self._engines, self._curves
        sizes[: len(self._padded), : self._padded.shape[1]] = self._padded
        self._engines, self._curves, self._padded = engines, curves, sizes

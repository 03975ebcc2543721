"""A vLLM engine in its own process that recomputes chosen rows, driven by `ReusingEngine`.

Its connector keeps documents' KV as the store keeps blocks. A request says in its
`kv_transfer_params` what it reuses: `{"runs": [[document, first token, length, position], ...],
"depth": layers in which tokens of runs are computed, "last": position or null}`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.kvstore.child import Child, serve
from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.extensions.extension import EXTENSIBLE_WORKER
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_lab.blending.correct import Case, with_depths
from headrace_lab.models.exact import Exact
from headrace_lab.models.lm import LM
from headrace_lab.texts.prompts import Prompt
from headrace_prefill.blending.engine.connector import BlendingConnector, LoadStart, RecomputePlan
from headrace_prefill.blending.engine.kv_scatter import KvScatter, StoredRun
from headrace_prefill.blending.engine.paged import BlockTable
from headrace_prefill.blending.engine.probe import Probe
from headrace_prefill.blending.engine.rows import RowEngine, Rows
from headrace_prefill.blending.engine.selective_recompute import (
    RecomputeRequest,
    SelectiveRecompute,
)
from tests.support import blending_engine, run
from tests.support.forked import Forked
from tests.support.plain_llama import PlainLlama
from tests.support.program import IN_ONE_PROCESS, engine_environment

BLOCK, BLOCKS = 128, 64
SCRATCH = (40, 33, 52, 21, 61, 37, 29, 46)
"""Blocks, in no order, for rows that the engine's scheduler knows nothing of: it must be idle."""
DOCUMENTS: dict[str, Stored] = {}


@dataclass
class Stored:
    """A document's KV, as the store keeps it."""

    tokens: list[int]
    payload: NDArray[np.uint8]
    sums: NDArray[np.uint64]
    seeds: NDArray[np.uint64]

    def run(self, first: int, length: int, new: int) -> StoredRun:
        """Some of its tokens, wanted at a position."""
        blocks = slice(first // BLOCK, -(-(first + length) // BLOCK))
        size = self.payload.shape[1]
        addresses = self.payload.ctypes.data + np.arange(len(self.payload)) * size
        return StoredRun(
            addresses[blocks].astype(np.uint64),
            *(self.sums[blocks], self.seeds[blocks]),
            offset=first % BLOCK,
            length=length,
            old=first,
            new=new,
        )


def layout_of(rows: RowEngine) -> BlockLayout:
    """Of the engine's cache."""
    caches = {f"layers.{n}": cache for n, cache in enumerate(rows.kv.caches)}
    return BlockLayout.of_tensors(caches, BLOCKS)


class TestedConnector(BlendingConnector):
    """Finds what the request itself says."""

    rows_per_step = 64

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.budget_rows = min(meta.budget_rows, self.rows_per_step)
        return meta

    def find(self, request: Any, computed_tokens: int) -> Any:
        found = (request.kv_transfer_params or {}).get("blending")
        return found if found and found["runs"][0][3] >= computed_tokens else None

    def planned(self, begin: LoadStart) -> RecomputePlan:
        runs = [DOCUMENTS[name].run(*rest) for name, *rest in begin.found["runs"]]
        last = begin.found.get("last")
        if begin.found["depth"] is None:
            return RecomputePlan(runs, lambda mass: np.empty(0, np.int64))
        depths = np.full(len(begin.token_ids), begin.found["depth"])
        if last is None:
            return RecomputePlan(runs, lambda mass: depths)

        def choose(mass: NDArray[np.float32] | None) -> NDArray[np.int64]:
            """The half of the tokens that the last rows attend to most."""
            assert mass is not None
            total = mass.sum(0)
            return np.where(total >= np.median(total), depths, 0)

        return RecomputePlan(runs, choose, last)

    def scatter(self, rows: RowEngine) -> KvScatter:
        return KvScatter(rows.kv, layout_of(rows), rows.rope)


class ReusingEngine:
    """The engine, from outside. `do` calls a method of `Engine`."""

    def __init__(self, model: Path) -> None:
        self._folder = TemporaryDirectory()
        log = Path(self._folder.name) / "log"
        environment = engine_environment(**IN_ONE_PROCESS)
        run.engine_started()
        self._child = Child(
            "blending_engine", {"model": model}, environment, log, "tests.support.", Forked
        )
        self._child.answer()

    def do(self, action: str, **parameters: Any) -> Any:
        """As `Child.do`."""
        return self._child.do(action, **parameters)

    def end(self) -> None:
        """End it."""
        self._child.end()
        self._folder.cleanup()


class Engine:
    """The engine's own process."""

    def __init__(self, model: str) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._plain, self._folder = PlainLlama(Path(model)), model
        self._llm = LLM(
            model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=2048,
            max_num_batched_tokens=256,
            num_gpu_blocks_override=BLOCKS,
            worker_cls=EXTENSIBLE_WORKER,
            kv_transfer_config=KVTransferConfig(
                kv_connector="TestedConnector",
                kv_connector_module_path="tests.support.blending_engine",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
            ),
        )
        self._connector: Any = get_kv_transfer_group()
        self._rows: RowEngine = self._connector._rows
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._model = self._core.model_executor.driver_worker.worker.get_model()

    # Rows alone

    def recompute(
        self, tokens: list[int], depths: list[int], stale: list[int], parts: int = 1
    ) -> dict[str, Any]:
        """Compute rows over the KV of other tokens; errors against the plain Llama.

        Args:
            stale: token ids whose KV lies in the cache before.
            parts: that the rows are computed in.
        """
        table, n = self._table(), len(tokens)
        self._fill(stale, table)
        keys, values = self._read(table, n)
        chosen = np.flatnonzero(depths)
        logits = None
        for part in np.array_split(chosen, parts):
            rows = Rows(table, part, np.array(tokens)[part], np.array(depths)[part])
            last = self._rows.compute([rows])
            logits = self._model.compute_logits(last) if len(last) else logits
        wanted = self._plain.compute(tokens, depths, keys, values)
        found = self._read(table, n)
        return {
            "keys": _error(found[0], wanted.keys),
            "values": _error(found[1], wanted.values),
            "logits": None if logits is None else _error(logits[-1], wanted.logits[-1]),
        }

    def against_vllm(self, tokens: list[int], first: int) -> dict[str, Any]:
        """Compute all rows from `first` on over vLLM's KV of those before; errors against vLLM's KV
        of the whole prompt, its next token, and ours."""
        self._llm.reset_prefix_cache()
        answer = self.answers([{"tokens": tokens}], max_tokens=2)[0]
        theirs = BlockTable(np.array(self._last_blocks), BLOCK)
        table, at = self._table(), np.arange(len(tokens))
        keys, values = self._read(theirs, len(tokens))
        before = torch.from_numpy(table.slots(at[:first]))
        for layer in range(self._rows.layers):
            self._rows.kv.put(layer, before, keys[layer, :first], values[layer, :first])
        rest = at[first:]
        depths = np.full(len(rest), self._rows.layers)
        last = self._rows.compute([Rows(table, rest, np.array(tokens)[rest], depths)])
        found = self._read(table, len(tokens))
        return {
            "keys": _error(found[0], keys),
            "values": _error(found[1], values),
            "tokens": [answer["tokens"][0], int(self._model.compute_logits(last)[-1].argmax())],
        }

    def together(self, prompts: list[list[int]]) -> float:
        """Two prompts in one batch: the error against each alone."""
        tables = [self._table(0, 4), self._table(4, 8)]
        parts = []
        for table, tokens in zip(tables, prompts, strict=True):
            at = np.arange(len(tokens))
            depths = 1 + (at * 7 % 3 == 0).astype(np.int64)
            parts.append(Rows(table, at, np.array(tokens), depths))
        self._rows.compute(parts)
        both = [self._read(t, len(p)) for t, p in zip(tables, prompts, strict=True)]
        for part in parts:
            self._rows.compute([part])
        alone = [self._read(t, len(p)) for t, p in zip(tables, prompts, strict=True)]
        return max(
            _error(a, b)
            for x, y in zip(both, alone, strict=True)
            for a, b in zip(x, y, strict=True)
        )

    def probe(
        self, tokens: list[int], last: int, parts: int, missing: tuple[int, int] = (0, 0)
    ) -> dict[str, Any]:
        """Probe over the KV of the tokens in reverse, of which some positions have none; errors of
        the mass and of the probe's own K and V against the plain Llama, and whether the cache is as
        before."""
        table, n, layers = self._table(), len(tokens), self._rows.layers
        self._fill(tokens[::-1], table)
        keys, values = self._read(table, n)
        there = np.ones(n, np.bool_)
        there[slice(*missing)] = False
        probe = Probe(self._rows, table, np.array(tokens), last, there)
        for part in np.array_split(np.arange(len(probe.rows.positions)), parts):
            rows = probe.rows
            positions = rows.positions[part]
            chunk = Rows(table, positions, rows.token_ids[part], rows.depths[part])
            watch = partial(_watched, probe, positions)
            self._rows.compute([chunk], watch)
        mass = probe.finish()
        depths = np.zeros(n, np.int64)
        depths[probe.rows.positions] = layers
        plain = self._plain.compute(tokens, depths.tolist(), keys, values, missing)
        wanted = torch.stack([a[:, -(n - last) :].mean((0, 1)) for a in plain.attention])
        found = self._read(table, n)
        same = [
            torch.equal(a[:, :last], b[:, :last])
            for a, b in zip(found, (keys, values), strict=True)
        ]
        return {
            "error": _error(torch.from_numpy(mass), wanted),
            "keys": _error(found[0], plain.keys),
            "values": _error(found[1], plain.values),
            "kept": all(same),
        }

    def draft(self, tokens: list[int], last: int, missing: tuple[int, int]) -> dict[str, Any]:
        """Probe with a draft: its tokens and the plain Llama's, the mass's error, and whether the
        cache is as before wherever there is KV."""
        *before, final = tokens
        table, n, layers = self._table(), len(before), self._rows.layers
        self._fill(before[::-1], table)
        keys, values = self._read(table, n)
        there = np.ones(n, np.bool_)
        there[slice(*missing)] = False
        probe = Probe(self._rows, table, np.array(before), last, there, final)
        said: list[int] = []
        while True:
            rows = probe.rows
            hidden = self._rows.compute([rows], partial(_watched, probe, rows.positions))
            if not probe.drafts:
                break
            said.append(self._rows.likeliest(hidden[-1:]))
            probe.draft(said[-1])
        wanted: list[int] = []
        whole, plain = list(tokens), None
        for _ in range(len(said) + 1):
            more = (0, 0, 0, 0, 0, len(whole) - n)
            stale = [torch.nn.functional.pad(part, more) for part in (keys, values)]
            depths = [0] * last + [layers] * (len(whole) - last)
            plain = self._plain.compute(whole, depths, *stale, missing)
            wanted.append(int(plain.logits[-1].argmax()))
            whole.append(wanted[-1])
        assert plain is not None
        mass = torch.stack([a.mean((0, 1))[:n] for a in plain.attention])
        after = self._read(table, n)
        same = [
            torch.equal(new[:, there][:, : -(n - last)], old[:, there][:, : -(n - last)])
            for new, old in zip(after, (keys, values), strict=True)
        ]
        return {
            "tokens": said,
            "wanted": wanted[:-1],
            "error": _error(torch.from_numpy(probe.finish()), mass),
            "kept": all(same),
        }

    # Stored documents

    def store(self, name: str, tokens: list[int]) -> None:
        """Keep a document's KV as the store does."""
        table = self._table()
        self._fill(tokens, table)
        layout = layout_of(self._rows)
        blocks = table.blocks[: -(-len(tokens) // BLOCK)]
        payload = np.zeros((len(blocks), layout.block_bytes), np.uint8)
        starts = payload.ctypes.data + np.arange(len(blocks)) * layout.block_bytes
        seeds = np.arange(len(blocks) * len(layout.layers), dtype=np.uint64).reshape(
            len(blocks), -1
        )
        sums = EngineCache(layout).save(blocks, starts.astype(np.uint64), seeds)
        DOCUMENTS[name] = Stored(tokens, payload, sums, seeds)

    def flip(self, name: str) -> None:
        """One bit of a document's last block."""
        DOCUMENTS[name].payload[-1, 777] ^= 1

    def placed(self, name: str, first: int, length: int, new: int) -> dict[str, Any]:
        """Place a run: errors of layer 0, where KV depends on token and position alone, against
        computing these tokens there; of all V against the stored ones; whether other slots are as
        before."""
        table, tokens = self._table(), DOCUMENTS[name].tokens
        self._fill(tokens, table)
        _, stored = self._read(table, len(tokens))
        self._fill([5] * 1000, table)
        whole = [t.clone() for t in self._read(table, 1000)]
        scatter = self._connector.scatter(self._rows)
        for piece in DOCUMENTS[name].run(first, length, new).pieces(BLOCK):
            scatter.place(piece, table)
        keys, values = self._read(table, 1000)
        within = torch.zeros(1000, dtype=torch.bool)
        within[new : new + length] = True
        at = np.arange(new, new + length)
        moved = np.array(tokens)[first : first + length]
        self._rows.compute([Rows(table, at, moved, np.ones(length, np.int64))])
        fresh, _ = self._read(table, 1000)
        return {
            "keys": _error(keys[0, within], fresh[0, within]),
            "values": _error(values[:, within], stored[:, first : first + length]),
            "others": all(
                torch.equal(a[:, ~within], b[:, ~within])
                for a, b in zip((keys, values), whole, strict=True)
            ),
        }

    def drifted(
        self, tokens: list[int], runs: list[list[Any]], depths: list[int], rows: int
    ) -> dict[str, float]:
        """Fill a prompt with selective recompute, so many rows a step: errors against plain torch,
        and how far drift moves what is not computed."""
        table, lm = self._table(), LM(self._folder)
        self._fill([5] * len(tokens), table)
        placed = [DOCUMENTS[name].run(*rest) for name, *rest in runs]
        request = RecomputeRequest(
            *("it", np.array(tokens), table, 0, placed), lambda _: np.array(depths)
        )
        side = SelectiveRecompute(self._rows, self._connector.scatter(self._rows))
        side.start("it", lambda: request)
        while len(side):
            assert not side.step(rows).failed
        chunks = [(new, length) for _, _, length, new in runs]
        before = [DOCUMENTS[name].tokens[:first] for name, first, _, _ in runs]
        prompt = Prompt("it", tokens, chunks, before, len(tokens), "inside", 1.0)
        case = Case.of(lm, prompt, Exact.of(lm, tokens, 1))
        wanted, stale = (
            with_depths(lm, case, np.array(depths), drifts=drifts).kv for drifts in (True, False)
        )
        keys, values = self._read(table, len(tokens))
        return {
            "keys": _error(keys, wanted.keys),
            "values": _error(values, wanted.values),
            "moved": _error(wanted.keys, stale.keys),
        }

    # Requests

    def answers(
        self,
        requests: list[dict[str, Any]],
        max_tokens: int = 8,
        rows_per_step: int = 64,
        abort: dict[str, int] | None = None,
    ) -> list[dict[str, Any]]:
        """Greedy answers to requests that come together.

        Args:
            requests: `tokens`, and what they reuse (`blending`).
            rows_per_step: of selective recompute.
            abort: engine steps after which a request is aborted, by its number.
        """
        from vllm import SamplingParams

        TestedConnector.rows_per_step = rows_per_step
        engine, before = self._llm.llm_engine, self._connector._pass.rows_computed
        for number, request in enumerate(requests):
            params = SamplingParams(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
            )
            prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
            if "blending" in request:
                params.extra_args = {"kv_transfer_params": {"blending": request["blending"]}}
                prompt["cache_salt"] = request.get("salt", f"reuse-{self._salts()}")
            engine.add_request(str(number), prompt, params)
        found: dict[str, dict[str, Any]] = {}
        preempted: dict[str, int] = {}
        steps = longest = 0
        while engine.has_unfinished_requests() or self._core.scheduler.has_requests():
            done = self._connector._pass.rows_computed
            outputs = engine.step()
            for name, request in list(self._core.scheduler.requests.items()):
                preempted[name] = request.num_preemptions
                [self._last_blocks] = self._core.scheduler.kv_cache_manager.get_block_ids(name)
            for output in outputs:
                if output.finished:
                    [answer] = output.outputs
                    found[output.request_id] = {
                        "tokens": list(answer.token_ids),
                        "cached": output.num_cached_tokens,
                        "steps": steps,
                    }
            longest = max(longest, self._connector._pass.rows_computed - done)
            steps += 1
            for name, after in (abort or {}).items():
                if after == steps:
                    engine.abort_request([name])
        pool = self._core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1, "blocks are never given back"
        assert not len(self._connector._pass) and not self._connector._blocks
        work = {
            "rows": self._connector._pass.rows_computed - before,
            "longest": longest,
            "preemptions": sum(preempted.values()),
        }
        return [{**found.get(str(n), {"tokens": None}), **work} for n in range(len(requests))]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    _salted = 0
    _last_blocks: list[int] = []

    def _salts(self) -> int:
        self._salted += 1
        return self._salted

    def _table(self, first: int = 0, end: int = len(SCRATCH)) -> BlockTable:
        return BlockTable(np.array(SCRATCH[first:end]), BLOCK)

    def _fill(self, tokens: list[int], table: BlockTable) -> None:
        at = np.arange(len(tokens))
        depths = np.full(len(tokens), self._rows.layers)
        self._rows.compute([Rows(table, at, np.array(tokens), depths)])

    def _read(self, table: BlockTable, n: int) -> tuple[Tensor, Tensor]:
        """K and V [layers, n, heads, dim]."""
        slots = torch.from_numpy(table.slots(np.arange(n)))
        pairs = [self._rows.kv.gather(layer, slots) for layer in range(self._rows.layers)]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def _watched(
    probe: Probe, positions: NDArray[np.int64], layer: int, queries: Tensor, output: Tensor, _: Any
) -> None:
    probe.watch(layer, queries, output, positions)


def _error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference; infinite for other shapes."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found.float() - wanted.float()).abs().max()) if found.numel() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    # The engine imports this module by its name, where documents must be, too.
    serve(lambda: blending_engine.Engine(args.model))


if __name__ == "__main__":
    main()

"""Cost and savings of sparse attention inside vLLM's CPU backend.

    python -m benchmarks.sparse.engine --json FILE

One layer of SmolLM2's shape (9 heads, 3 KV heads of 64, bfloat16), one row, one thread, no engine.
The peer is vLLM's own backend with its own block of 128 tokens over the same KV, called in turns
with ours. Keys are random walks: time does not depend on them.

    engine.attention_us_vs_dense.K       time of the layer's attention, scores and choice included,
                                         over vLLM's, at a KV of 8k and 32k (targets 0.6 and 0.35)
    engine.attention_us_vs_dense_u16.K   the same with pages of 16 tokens
    engine.attention_us_vs_dense_basis.K, _u16_basis.K   with a basis
    engine.dense_us.K                    vLLM's, in microseconds
    engine.even_at_tokens                the shortest KV at which ours takes no longer
    engine.metadata_us_vs_dense          of a step, once for all layers
    engine.exact_us_vs_dense             an exact row in our backend over vLLM's
    engine.summary_us, .check_us         of one page of 32 tokens in one layer: to make it, to find
                                         it unchanged
    engine.summary_bytes_vs_keys         of summaries and sums
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.sparse.backend import Request, Rig, Shape, random_sequence
from headrace_decode.sparse.basis import Basis
from headrace_lab.sparse.moments import Moments

SHARE = 0.1
SIZES = {"8k": 8192, "32k": 32768}
SHORT = (512, 1024, 1536, 2048, 3072, 4096)
SHAPE = Shape()
TURNS = 60


def times_us(calls: list[Callable[[], object]], turns: int = TURNS) -> list[float]:
    """Return the least of many times of calls that take turns: others use this machine, too."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 3):
        for call, into in zip(calls, found, strict=True):
            begun = time.perf_counter()
            call()
            if turn >= 3:
                into.append((time.perf_counter() - begun) * 1e6)
    return [min(each) for each in found]


class Pair:
    """One request's KV in our backend and in vLLM's."""

    def __init__(self, tokens: int, page: int, basis: bool = False) -> None:
        self.request = random_sequence(SHAPE, tokens, share=SHARE)
        learned = _basis(self.request, page) if basis else None
        self.ours = Rig(SHAPE, page, True, tokens // page + 16, basis=learned)
        self.vllms = Rig(SHAPE, 128, False, tokens // 128 + 8)
        keys, values = self.request.keys, self.request.values
        self.our_tables, self.tables = [
            [rig.write(keys, values)] for rig in (self.ours, self.vllms)
        ]
        self.steps = 0
        while getattr(self.metadata(), "sparse", None) is None and self.steps < 1000:
            self.steps += 1

    def metadata(self) -> object:
        return self.ours.metadata([self.request], self.ours.common([self.request], self.our_tables))

    def dense_metadata(self) -> object:
        return self.vllms.metadata([self.request], self.vllms.common([self.request], self.tables))

    def attention_us(self) -> list[float]:
        """Return the microseconds of the layer's attention: ours, vLLM's."""
        query, sparse, dense = self.request.queries, self.metadata(), self.dense_metadata()
        return times_us(
            [lambda: self.ours.forward(query, sparse), lambda: self.vllms.forward(query, dense)]
        )

    def exact_us(self) -> list[float]:
        """Return the microseconds of an exact row: ours, vLLM's."""
        request = self.request
        exact = Request(request.keys, request.values, request.queries)
        ours = self.ours.metadata([exact], self.ours.common([exact], self.our_tables))
        vllms = self.dense_metadata()
        query = request.queries
        return times_us(
            [lambda: self.ours.forward(query, ours), lambda: self.vllms.forward(query, vllms)]
        )


def _basis(request: Request, page: int) -> Basis:
    moments = Moments(SHAPE.kv_heads, SHAPE.head_dim)
    moments.add_pages(request.keys.float().unflatten(0, (-1, page)).transpose(1, 2).numpy())
    moments.add_queries(torch.randn(SHAPE.kv_heads, 500, SHAPE.head_dim).numpy())
    return moments.basis()


def upkeep_us() -> tuple[float, float, float]:
    """To make a summary, and to find it unchanged, of a page in one layer; bytes over the keys'."""
    rig = Rig(SHAPE, 32, True, 1024)
    pages = np.arange(1, 1024)
    begun = time.perf_counter()
    rig.summary_table.refresh(pages, 10**9)
    made = time.perf_counter()
    rig.summary_table.refresh(pages, 10**9)
    checked = time.perf_counter() - made
    key_bytes = rig.cache.nbytes / 2
    per = 1e6 / len(pages)
    return (made - begun - checked) * per, checked * per, rig.summary_table.nbytes / key_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name, tokens in SIZES.items():
        for page, suffix in ((32, ""), (16, "_u16")):
            pair = Pair(tokens, page)
            ours, dense = pair.attention_us()
            figures[f"engine.attention_us_vs_dense{suffix}.{name}"] = ours / dense
            if page == 32:
                figures[f"engine.dense_us.{name}"] = dense
                figures[f"engine.steps_to_sparse_one_layer.{name}"] = pair.steps
            ours, dense = Pair(tokens, page, basis=True).attention_us()
            figures[f"engine.attention_us_vs_dense{suffix}_basis.{name}"] = ours / dense
            exact, dense = pair.exact_us()
            figures[f"engine.exact_us_vs_dense{suffix}.{name}"] = exact / dense
    even = 0
    for tokens in reversed(SHORT):
        pair = Pair(tokens, 32)
        if pair.steps >= 1000:
            break
        ours, dense = pair.attention_us()
        figures[f"engine.attention_us_vs_dense.{tokens}"] = ours / dense
        if ours > dense:
            break
        even = tokens
    figures["engine.even_at_tokens"] = even
    pair = Pair(8192, 32)
    built, dense = times_us([pair.metadata, pair.dense_metadata])
    figures["engine.metadata_us_vs_dense"] = built / dense
    made, checked, size = upkeep_us()
    figures["engine.summary_us"], figures["engine.check_us"] = made, checked
    figures["engine.summary_bytes_vs_keys"] = size
    found = {"figures": {name: round(value, 4) for name, value in figures.items()}}
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

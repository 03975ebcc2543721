"""Share of chosen pages that have a slot already when a step needs them, by rule and slots.

    python -m benchmarks.sparse.prefetch --json FILE [--texts N]

SmolLM2-135M in fp32, with its own queries and keys over the texts that `benchmarks.sparse` holds
out. Engines fetch on demand because of these figures. Pages have 32 tokens, and 10 % of them are
chosen by own directions; each of the last 128 positions is a decode step. Pages of the newest 256
tokens do not count: they are in the engine's memory anyway. FILE.npz keeps the scores.

    hit_rate.RULE.SLOTS     of chosen pages; SLOTS over the pages that a step chooses
    moved.RULE.SLOTS        pages fetched in a step, on demand and ahead, over those chosen
    slack.SLACK.left_out    share of misses that a page with a slot replaces
    slack.SLACK.lost        lost share of the attention that the choice covers

Rules: `lru` evicts the page that was chosen longest ago and fetches on demand only; `demand` evicts
the page of least worth and fetches on demand only; `ahead` also fetches pages of high worth before
the next step; `fading F` is `ahead` with another fading; `layer` is `ahead` with this step's scores
of the layer before added to the page's own worth.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_decode.attention.page_counts import RECENT, SINKS, selected_page_count
from headrace_decode.sparse.offload import working_set as working
from headrace_decode.sparse.offload.working_set import WorkingSet
from headrace_decode.sparse.page_selection import select_pages
from headrace_lab.sparse.miss_substitution import substitute_misses

PAGE_TOKENS, STEPS, NEWEST_TOKENS = 32, 128, 256
SHARE, RATIOS = 0.1, (1.25, 1.5, 2.0)
SLACKS = (0.02, 0.1)
FADINGS = (0.0, 0.5, 0.9)
Scores = NDArray[np.float32]
"""[layers, steps, kv_heads, pages]; 0 of a step's newest page and later ones."""


def scores_of(folder: str, number: int) -> tuple[Scores, int]:
    """Return a text's scores, and its length in tokens."""
    import torch
    from transformers import AutoTokenizer

    from benchmarks.sparse.texts import text
    from headrace_lab.models.lm import LM
    from headrace_lab.sparse.attention import Layer, estimated

    torch.set_num_threads(1)
    tokenizer, lm = AutoTokenizer.from_pretrained(folder), LM(folder)

    def encode(words: str) -> list[int]:
        found: list[int] = tokenizer.encode(words, add_special_tokens=False, verbose=False)
        return found

    tokens = torch.tensor(text(number, encode, held_out=True).tokens)
    kv, first, asked = lm.empty(len(tokens)), len(tokens) - STEPS, []

    def watch(layer: int, rows: torch.Tensor, q: torch.Tensor) -> None:
        asked.append(q[rows >= first].clone())

    def keep(layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rows >= first if layer == lm.layers - 1 else torch.ones_like(rows).bool()

    with torch.no_grad():
        lm.compute(tokens, kv, torch.arange(len(tokens)), keep, watch)
        rows = torch.arange(first, len(tokens))
        found = [
            estimated(Layer.of(n, q, rows, kv.keys[n], kv.values[n], PAGE_TOKENS), None).numpy()
            for n, q in enumerate(asked)
        ]
    return np.stack(found).transpose(0, 2, 1, 3).copy(), len(tokens)


def chosen_of(scores: Scores, tokens: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield for each step and layer: the number of pages before the newest, and the chosen ones."""
    layers, steps = scores.shape[:2]
    for step in range(steps):
        at = tokens - steps + step
        count, n = selected_page_count(at + 1, PAGE_TOKENS, SHARE), at // PAGE_TOKENS
        assert count is not None
        for layer in range(layers):
            yield n, select_pages(scores[layer, step, :, :n], count - 1, SINKS, RECENT - 1)


class Lru:
    """Slots by when their page was chosen last."""

    def __init__(self, layers: int, kv_heads: int, slots: int, pages: int) -> None:
        self._set = WorkingSet(layers, kv_heads, slots, pages)
        self._now = np.float32(0)

    def step(self, layer: int, cold: NDArray[np.int64]) -> tuple[int, int]:
        """Hits, and pages that moved."""
        hits = int((self._set.slots_of(layer, cold) >= 0).sum())
        self._now += np.float32(1)
        np.put_along_axis(self._set._worth[layer], cold, self._now, axis=1)
        pages = self._set._slot_of.shape[2]
        return hits, len(self._set.demand(layer, cold, pages).pages)


def replayed(scores: Scores, tokens: int, ratio: float, rule: str) -> list[int]:
    """Return the numbers of hits, chosen and moved pages of all steps after the first."""
    layers, steps, heads, pages = scores.shape
    most = max(chosen.shape[1] for _, chosen in chosen_of(scores[:1], tokens))
    slots = int(ratio * most)
    mine, lru = WorkingSet(layers, heads, slots, pages, SINKS), Lru(layers, heads, slots, pages)
    total = [0, 0, 0]
    for number, (n, chosen) in enumerate(chosen_of(scores, tokens)):
        step, layer = divmod(number, layers)
        newest = n - NEWEST_TOKENS // PAGE_TOKENS
        # Every head has as many cold pages as the one with fewest; the rest are like them.
        count = int((chosen < newest).sum(1).min())
        cold, now = chosen[:, :count], scores[layer, step, :, :newest]
        if rule == "lru":
            hits, moved = lru.step(layer, cold)
        else:
            hits = int((mine.slots_of(layer, cold) >= 0).sum())
            mine.record_scores(layer, now)
            moved = len(mine.demand(layer, cold, n).pages)
            if rule == "layer":
                before = mine._worth[layer].copy()
                if step + 1 < steps:  # the layer before has its scores of the next step in time
                    nearby = scores[max(layer - 1, 0), step + 1, :, :newest]
                    mine._worth[layer, :, :newest] += nearby.mean(0)
                moved += len(mine.ahead(layer, newest, slots).pages)
                mine._worth[layer] = before
            elif rule != "demand":
                moved += len(mine.ahead(layer, newest, slots).pages)
        if step:
            total = [a + b for a, b in zip(total, (hits, cold.size, moved), strict=True)]
    return total


def left_out(scores: Scores, tokens: int, ratio: float, slack: float) -> list[float]:
    """Misses, those that are left out, attention that is lost, and that chosen pages cover."""
    layers, _, heads, pages = scores.shape
    most = max(chosen.shape[1] for _, chosen in chosen_of(scores[:1], tokens))
    mine = WorkingSet(layers, heads, int(ratio * most), pages, SINKS)
    total = np.zeros(4)
    for number, (n, chosen) in enumerate(chosen_of(scores, tokens)):
        step, layer = divmod(number, layers)
        now = scores[layer, step, :, :n]
        before = mine.slots_of(layer, np.tile(np.arange(n), (heads, 1)))
        before[:, n - NEWEST_TOKENS // PAGE_TOKENS :] = 0
        taken = substitute_misses(now, chosen, before, SINKS, RECENT - 1, slack)
        missed = (np.take_along_axis(before, chosen, 1) < 0).sum()
        fetched = (np.take_along_axis(before, taken, 1) < 0).sum()
        covered = np.take_along_axis(now, chosen, 1).sum()
        if step:
            lost = covered - np.take_along_axis(now, taken, 1).sum()
            total += missed, missed - fetched, lost, covered
        mine.record_scores(layer, now)
        mine.demand(layer, taken, n)
        mine.ahead(layer, n, mine.slots)
    return total.tolist()


def figures(texts: list[tuple[Scores, int]]) -> dict[str, float]:
    """All texts together."""
    found: dict[str, float] = {}
    for ratio in RATIOS:
        for rule in ("lru", "demand", "ahead", "layer"):
            _add(found, texts, ratio, rule, rule)
    for fading in FADINGS:
        usual, working.FADING = working.FADING, fading
        _add(found, texts, 1.5, "ahead", f"fading {fading}")
        working.FADING = usual
    for slack in SLACKS:
        parts = np.sum([left_out(*one, 1.5, slack) for one in texts], 0)
        found[f"slack.{slack}.left_out"] = parts[1] / max(parts[0], 1)
        found[f"slack.{slack}.lost"] = parts[2] / parts[3]
    return {name: round(float(value), 5) for name, value in found.items()}


def _add(
    found: dict[str, float],
    texts: list[tuple[Scores, int]],
    ratio: float,
    rule: str,
    name: str,
) -> None:
    hits, chosen, moved = np.sum([replayed(*one, ratio, rule) for one in texts], 0)
    found[f"hit_rate.{name}.{ratio}"] = hits / chosen
    found[f"moved.{name}.{ratio}"] = moved / chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--texts", type=int, default=5, metavar="N")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kept = options.json.with_suffix(".npz")
    texts: list[tuple[Scores, int]] = []
    if kept.is_file():
        with np.load(kept) as file:
            texts = [(file[f"scores{n}"], int(file[f"tokens{n}"])) for n in range(len(file) // 2)]
    for number in range(len(texts), options.texts):
        from headrace.model import resolve

        texts.append(scores_of(str(resolve(None)), number))
        arrays = {f"scores{n}": one for n, (one, _) in enumerate(texts)}
        lengths = {f"tokens{n}": np.array(length) for n, (_, length) in enumerate(texts)}
        np.savez(kept, **arrays, **lengths)  # type: ignore[arg-type]
        print(f"text {number}: {texts[-1][1]} tokens", flush=True)
    found = {"figures": figures(texts[: options.texts])}
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

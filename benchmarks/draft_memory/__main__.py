"""Hits and cost of the drafting memory: ``python -m benchmarks.draft_memory --json FILE``.

Replays code, agents' function calls and prose (`corpora`) through the memory, Arctic Inference's
suffix cache and vLLM's prompt look-up (`replay`), times the memory's calls (`costs`) and the
loading of a corpus (`loading`), looks for traces of one tenant's texts in another's drafts
(`isolation`), and lets replicas share what they learn (`share`). These modules describe their
figures.

- ``C.accepted_per_query_vs_arctic``: accepted tokens per query over Arctic's on corpus C, with as
  many drafted tokens in total; ``C.drafted_vs_arctic`` is the ratio of drafted tokens
- ``C.accepted_per_query_vs_ngram``: the same against vLLM's prompt look-up
- ``C.without_X``: our accepted tokens per query without X, over those with it, at Arctic's drafted
  tokens: ``failures`` (tables of refusals), ``learning`` (chances stay at their prior)
- ``C.calibration_error``: mean |predicted - measured| survival over bins of a twentieth, weighted
  by drafted tokens; ``C.without_X.calibration_error`` likewise
- ``C.odds_after_N``: accepted over refused first tokens of drafts after a match of N tokens, up to
  the next N

It needs the packages ``arctic-inference`` and ``bfcl-eval`` on the path, which are no dependency:
``pip install --no-deps --target DIR arctic-inference bfcl-eval``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.draft_memory import corpora, costs, isolation, loading, share
from benchmarks.draft_memory.arms import Arctic, Ngram, Ours
from benchmarks.draft_memory.replay import MOST, at_equal_drafts, replay
from headrace_decode.speculative.retrieval.acceptance import MATCH_BUCKET, MATCH_FROM

EXCHANGES = {"code": 100, "agent": 600, "prose": 100}
WITHOUT = {
    "failures": {"failures": False},
    "learning": {"learns": False},
}
PARTS = ("costs", "loading", "isolation", "share", "replay", "ablations")
TOKENIZER = "~/.cache/headrace/models/smollm2-135m-instruct/tokenizer.json"


def measure(
    name: str, exchanges: list[corpora.Exchange], *, ablate: bool
) -> tuple[dict[str, float], Ours]:
    """Return the figures of one corpus, and our arm as it was at Arctic's drafted tokens."""
    longest = max(len(each.prompt) + len(each.answer) for each in exchanges) + 1
    arctic = replay(Arctic(), exchanges)
    ngram = replay(Ngram(MOST, longest), exchanges)
    ours, arm, floor = at_equal_drafts(lambda at: Ours(at), exchanges, arctic.drafted)
    beside, _, _ = at_equal_drafts(lambda at: Ours(at), exchanges, ngram.drafted)
    figures = {
        "exchanges": float(len(exchanges)),
        "answer_tokens": float(sum(len(each.answer) for each in exchanges)),
        "accepted_per_query_vs_arctic": ours.accepted_per_query / arctic.accepted_per_query,
        "drafted_vs_arctic": ours.drafted / arctic.drafted,
        "floor": floor,
        "accepted_per_query_vs_ngram": beside.accepted_per_query / ngram.accepted_per_query,
        "drafted_vs_ngram": beside.drafted / ngram.drafted,
        "calibration_error": _reliability(arm)[3],
        **_odds(arm),
    }
    for kind, outcome in (("ours", ours), ("arctic", arctic), ("ngram", ngram)):
        figures[f"{kind}.accepted_per_query"] = outcome.accepted_per_query
        figures[f"{kind}.drafted_per_query"] = outcome.drafted / outcome.queries
    for part, setting in WITHOUT.items() if ablate else ():
        less, arm_less, _ = at_equal_drafts(
            lambda at, setting=setting: Ours(at, **setting),  # type: ignore[misc]
            exchanges,
            arctic.drafted,
        )
        figures[f"without_{part}"] = less.accepted_per_query / ours.accepted_per_query
        figures[f"without_{part}.calibration_error"] = _reliability(arm_less)[3]
    return {f"{name}.{key}": value for key, value in figures.items()}, arm


def _odds(arm: Ours) -> dict[str, float]:
    """Return the odds that a draft's first token is accepted, by the length of the match."""
    match, accepted = np.array(arm.firsts).T
    right = np.bincount(MATCH_BUCKET[match], accepted, len(MATCH_FROM))
    tried = np.bincount(MATCH_BUCKET[match], minlength=len(MATCH_FROM))
    odds = right / np.maximum(tried - right, 1.0)
    return {f"odds_after_{n}": float(value) for n, value in zip(MATCH_FROM, odds, strict=True)}


def _reliability(arm: Ours) -> tuple[list[float], list[float], list[int], float]:
    """Mean predicted and measured survival and tokens, by bins of predicted survival; the error.

    The first quarter of a replay, in which the memory has hardly seen anything, is left out.
    """
    table = np.array(arm.predicted[len(arm.predicted) // 4 :], float).reshape(-1, 2)
    bins = np.minimum((table[:, 0] * 20).astype(int), 19)
    predicted, measured, tokens = [], [], []
    for each in range(20):
        some = table[bins == each]
        if len(some) >= 30:
            predicted.append(float(some[:, 0].mean()))
            measured.append(float(some[:, 1].mean()))
            tokens.append(len(some))
    error = np.average(np.abs(np.subtract(predicted, measured)), weights=tokens)
    return predicted, measured, tokens, float(error)


def plot(arms: dict[str, Ours], path: Path) -> None:
    """Predicted against measured survival."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
    for name, arm in arms.items():
        predicted, measured, _, error = _reliability(arm)
        axes.plot(predicted, measured, marker="o", label=f"{name} (mean error {error:.3f})")
    axes.set_xlabel("predicted survival")
    axes.set_ylabel("measured survival")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the drafting memory finds and costs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the calibration")
    parser.add_argument("--tokenizer", type=Path, default=Path(TOKENIZER).expanduser())
    parser.add_argument("--only", choices=sorted(EXCHANGES), help="one corpus")
    parser.add_argument(
        "--part",
        choices=PARTS,
        help="one part alone; ablations include the replay",
    )
    args = parser.parse_args()
    start, encode = time.perf_counter(), corpora.tokenizer(args.tokenizer)
    names = [args.only] if args.only else list(EXCHANGES)
    loaded = {name: corpora.load(name, encode, EXCHANGES[name]) for name in names}
    parts = [args.part] if args.part else PARTS
    figures: dict[str, float] = {}
    if "costs" in parts:
        figures |= costs.measure(corpora.library(encode, costs.KEPT_TOKENS))
    if "loading" in parts:
        figures |= loading.measure()
    if "isolation" in parts:
        figures |= isolation.measure(loaded[names[0]])
    if "share" in parts:
        figures |= share.measure(loaded[names[0]])
    arms = {}
    for name in names if {"replay", "ablations"} & set(parts) else []:
        found, arms[name] = measure(name, loaded[name], ablate="ablations" in parts)
        figures |= found
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    for name, value in figures.items():
        print(f"{name:45} {value:12.4f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")
    if args.plot is not None and arms:
        plot(arms, args.plot)


if __name__ == "__main__":
    main()

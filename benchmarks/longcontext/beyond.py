"""Does the exact model still work beyond the positions that it was trained for?

    python -m benchmarks.longcontext.beyond --json FILE [--tokens N]

SmolLM2-135M in fp32, trained for 8,192 positions. Prose with facts at twelve depths, then all are
asked for, as of `benchmarks.longcontext`; no KV is dropped. Rotary embeddings: as trained; angles
divided by N / 8,192 (position interpolation, arXiv 2306.15595); and the base enlarged, so that
the slowest angle is divided by as much, and the fastest by nothing ("NTK-aware" scaling).

    EMBEDDING.perplexity   of the context's tokens, by 2,048 positions
    EMBEDDING.facts        tokens of answers that come first in the model's opinion, over all
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.longcontext.texts import case
from headrace_engine.rope import Rope

TRAINED, STEP, BIN = 8192, 512, 2048


def embeddings(config: dict[str, object], factor: float) -> dict[str, Rope]:
    """By name."""
    trained = Rope.of(config)
    dim = 2 * len(trained.speeds)
    grown = factor ** (torch.arange(0, dim, 2, dtype=torch.float64) / (dim - 2))
    return {
        "as trained": trained,
        "angles divided": Rope(trained.speeds / factor),
        "base enlarged": Rope(trained.speeds / grown),
    }


def measured(folder: str, tokens: int) -> dict[str, object]:
    from benchmarks.plain import model

    lm, encode = model(folder)
    one = case(0, encode, tokens, held_out=True)
    text, judged = torch.tensor(one.tokens), torch.tensor(one.judged)
    config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    found: dict[str, object] = {"tokens": len(text), "answers": len(judged)}
    for name, rope in embeddings(config, max(1.0, len(text) / TRAINED)).items():
        lm.rope = rope
        kv, losses, first = lm.empty(len(text)), list[Tensor](), list[Tensor]()
        for begin in range(0, len(text) - 1, STEP):
            rows = torch.arange(begin, min(len(text) - 1, begin + STEP))
            logits = lm.compute(text, kv, rows)
            losses.append(
                torch.nn.functional.cross_entropy(logits, text[rows + 1], reduction="none")
            )
            first.append(logits.argmax(-1) == text[rows + 1])
        bins = torch.cat(losses)[: one.first - 1].split(BIN)
        found[name] = {
            "perplexity": [round(float(each.mean().exp()), 2) for each in bins],
            "facts": float(torch.cat(first)[judged - 1].float().mean()),
        }
        print(name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--model", metavar="FOLDER", help="default: smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=15000, metavar="N", help="of the context")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from headrace.model import resolve

    found = measured(str(resolve(options.model)), options.tokens)
    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

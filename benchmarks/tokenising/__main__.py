"""Processor time of tokenising a conversation, whole and from kept segments.

    python -m benchmarks.tokenising [--model FOLDER_OR_NAME] [--json FILE]

A conversation of prose grows turn by turn to 220,000 characters. A replica tokenises each turn's
prompt twice: for the gateway's plan, and for the request. Figures, in ms of processor time:
    whole_ms: both passes of the last turn, each over the whole text;
    turn_ms: the same, from segments that earlier turns left; again_ms: its second pass alone;
    first_ms: both passes where no turn was known; sum_vs_whole: all turns, kept over whole.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.serving.environment import machine
from headrace.model import resolve
from headrace_decode.rendering.segment_tokenizer import SegmentTokenizer

CHARS = 220_000
ROOT = Path(__file__).parents[2]


def turns(prose: str, seed: int = 0) -> list[str]:
    """Return the prompt of each turn of a conversation in ChatML."""
    rng = random.Random(seed)

    def message(role: str, longest: int) -> str:
        chars = rng.randrange(200, longest)
        start = rng.randrange(len(prose) - chars)
        return f"<|im_start|>{role}\n{prose[start : start + chars]}<|im_end|>\n"

    text, prompts = message("system", 4_000), list[str]()
    while len(text) < CHARS:
        text += message("user", 12_000)
        prompts.append(f"{text}<|im_start|>assistant\n")
        text += message("assistant", 2_500)
    return prompts


def measure(folder: str) -> dict[str, float]:
    """Return the figures.

    Raises:
        RuntimeError: kept segments gave other tokens than the whole text.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str, add_special_tokens: bool) -> Sequence[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def made() -> SegmentTokenizer:
        return SegmentTokenizer(encode, tokenizer.added_tokens_decoder)

    prose = "".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    kept, passes = made(), list[tuple[float, float, float]]()
    for prompt in turns(prose):
        at_s, found = [time.process_time()], [encode(prompt, False)]
        at_s.append(time.process_time())
        for _ in range(2):
            found.append(kept.token_ids(prompt, False, None))
            at_s.append(time.process_time())
        if not found[0] == found[1] == found[2]:
            raise RuntimeError("kept segments gave other tokens")
        whole, first, again = (1e3 * (end - at) for at, end in pairwise(at_s))
        passes.append((2 * whole, first, again))
    fresh, began_s = made(), time.process_time()
    for _ in range(2):
        fresh.token_ids(prompt, False, None)
    whole, first, again = passes[-1]
    return {
        "chars": len(prompt),
        "tokens": len(found[0]),
        "turns": len(passes),
        "whole_ms": whole,
        "turn_ms": first + again,
        "again_ms": again,
        "first_ms": 1e3 * (time.process_time() - began_s),
        "sum_vs_whole": sum(b + c for _, b, c in passes) / sum(a for a, _, _ in passes),
    }


def main() -> None:
    """Run, print the figures, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenising")
    parser.add_argument("--model", metavar="FOLDER", help="or a name; default: SmolLM2-135M")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    figures = measure(str(resolve(args.model)))
    for name, value in figures.items():
        print(f"{name} {value:.3f}")
    if args.json:
        told = {"figures": figures, "environment": machine()}
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()

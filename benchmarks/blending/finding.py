"""How long it takes to find what prompts share with 1 GB of stored text.

    python -m benchmarks.blending.finding --json FILE [--gigabytes 1]

Texts are sources and documents of installed packages, in SmolLM2's tokens. Where they are fewer
than asked for, copies follow whose tokens are renamed by a permutation: other texts of the same
shape. Prompts of 2,000 to 6,000 tokens hold passages of stored texts, at any offset, and new text.

    finding.find_us_per_1k_tokens   median (target 200); beside it the 99th percentile
    finding.missed_share            of the passages' tokens
    finding.add_mtokens_per_s, bytes_per_token
    finding.hostile_us_per_1k_tokens  one token over and over, stored and asked
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_prefill.blending.finding.finder import Finder

BLOCK = 128
PROMPTS = 300
TENANT = "tenant"
Text = NDArray[np.int32]


def real_texts() -> tuple[list[Text], float]:
    """Texts of all packages, and bytes a token."""
    from transformers import AutoTokenizer

    from headrace.model import resolve
    from headrace_lab.texts.prompts import documents

    tokenizer = AutoTokenizer.from_pretrained(resolve(None))
    texts, size = [], 0
    files = documents(True) + documents(False)
    for first in range(0, len(files), 500):
        some = [file.read_text("utf-8", errors="replace") for file in files[first : first + 500]]
        size += sum(len(one.encode()) for one in some)
        coded = tokenizer(some, add_special_tokens=False)["input_ids"]
        texts += [np.array(one, np.int32) for one in coded]
    return texts, size / sum(map(len, texts))


def add(finder: Finder, text: Text) -> None:
    whole = len(text) // BLOCK
    chain, digests = b"", []
    for n in range(whole):
        chain = hashlib.blake2b(
            chain + text[n * BLOCK :][:BLOCK].tobytes(), digest_size=32
        ).digest()
        digests.append(chain)
    finder.add(TENANT, text, digests)


def timed_us(call: Callable[[Text], object], prompt: Text) -> float:
    begun = time.perf_counter()
    call(prompt)
    return (time.perf_counter() - begun) * 1e9 / len(prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--gigabytes", type=float, default=1.0, metavar="N")
    options = parser.parse_args()
    texts, token_bytes = real_texts()
    wanted = int(options.gigabytes * 1e9 / token_bytes)
    finder, rng = Finder(int(1.02 * wanted), BLOCK), np.random.default_rng(1)
    add(finder, texts[0])
    finder.find(TENANT, texts[0])
    kept, begun, added, copy = [texts[0]], time.perf_counter(), 0, 0
    while added < wanted:
        names = rng.permutation(49152).astype(np.int32) if copy else None
        for text in texts:
            mine = text if names is None else names[text]
            add(finder, mine)
            added += len(mine) // BLOCK * BLOCK
            kept.append(mine if rng.random() < 0.02 else kept[-1])
            if added >= wanted:
                break
        copy += 1
        print(f"{added / 1e6:.0f} of {wanted / 1e6:.0f} million tokens", flush=True)
    add_s = time.perf_counter() - begun
    find_us, missed, asked = [], 0, 0
    for _ in range(PROMPTS):
        parts, passages, at = [], [], 0
        for _ in range(int(rng.integers(2, 6))):
            parts.append(rng.integers(0, 49152, int(rng.integers(20, 400)), dtype=np.int32))
            text = kept[int(rng.integers(len(kept)))]
            text = text[: len(text) // BLOCK * BLOCK]
            first = int(rng.integers(0, max(1, len(text) - 300)))
            passage = text[first : first + int(rng.integers(300, 1500))]
            at += len(parts[-1])
            passages.append((at, len(passage)))
            at += len(passage)
            parts.append(passage)
        prompt = np.concatenate(parts)
        find_us.append(timed_us(lambda tokens: finder.find(TENANT, tokens), prompt))
        covered = np.zeros(len(prompt), bool)
        for run in finder.find(TENANT, prompt):
            covered[run.new : run.new + run.length] = True
        missed += sum(int((~covered[a : a + n]).sum()) for a, n in passages)
        asked += sum(n for _, n in passages)
    same = np.ones(100_000, np.int32)
    add(finder, same)
    values = {
        "stored_gigabytes": finder.tokens * token_bytes / 1e9,
        "real_gigabytes": sum(map(len, texts)) * token_bytes / 1e9,
        "find_us_per_1k_tokens": statistics.median(find_us),
        "find_us_per_1k_tokens_p99": float(np.percentile(find_us, 99)),
        "missed_share": missed / asked,
        "add_mtokens_per_s": added / add_s / 1e6,
        "bytes_per_token": finder.nbytes / wanted,
        "hostile_us_per_1k_tokens": timed_us(lambda tokens: finder.find(TENANT, tokens), same),
    }
    found = {f"finding.{name}": value for name, value in values.items()}
    options.json.write_text(json.dumps({"figures": found}, indent=1))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Time to the first token with most of a prompt reused, against computing the whole prompt.

    python -m benchmarks.blending.ttft --json FILE [--tokens 6000] [--share 0.8] [--prompts 5]

The laptop's app is started with `techniques.blending.mode: request`. Three documents are stored,
each as a prompt of its own. Then prompts hold new text and these documents in changing order. Each
is asked for with reuse and, under another salt, without; one at a time, by turns. With `--policy
local` the decode engine computes prompts, with `remote` the prefill engine.

    reuse.ttft_vs_full       median with reuse / median without (target 0.4 at 6,000 tokens, 80 %)
    reuse.ttft_s, full_s     the medians
    reuse.same_first_token   share of the prompts with the same first token
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.instance import running_instance
from headrace_lab.texts.prompts import documents

DOCUMENTS = 3
SALT = "reader"


def asked(client: httpx.Client, prompt: list[int], **extra: Any) -> tuple[float, int, str]:
    """Return the seconds to the first token, that token, and what the header says."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True, **extra}
    body |= {"return_token_ids": True}
    started = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        first, took = None, 0.0
        for line in answer.iter_lines():
            if line.startswith("data: {") and first is None:
                took = time.perf_counter() - started
                first = json.loads(line[6:])["choices"][0]["token_ids"][0]
        assert first is not None
        return took, first, answer.headers.get("x-headrace-techniques", "")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from headrace.model import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(None))
    files = iter(documents(True))

    def text(tokens: int) -> list[int]:
        found: list[int] = []
        while len(found) < tokens:
            words = next(files).read_text("utf-8", errors="replace")
            found += tokenizer.encode(words, add_special_tokens=False)
        return found[:tokens]

    size = int(options.tokens * options.share / DOCUMENTS)
    stored = [text(size + 128) for _ in range(DOCUMENTS)]  # the last block is not full
    settings = [
        "techniques.blending.mode=request",
        f"techniques.blending.recompute_ratio={options.budget}",
        *(f"{role}.kv_cache_gb=1.0" for role in ("prefill", "decode")),
    ]
    with (
        running_instance("reuse", settings) as instance,
        httpx.Client(base_url=instance.endpoint, timeout=300) as client,
    ):
        client.put("/headrace/v1/router", json={"policy": options.policy}).raise_for_status()
        for document in stored:
            asked(client, document, cache_salt=SALT)
        time.sleep(3.0)
        reuse, full, same, told = [], [], 0, set()
        for number in range(options.prompts):
            order = np.random.default_rng(number).permutation(DOCUMENTS)
            parts = [text(int(options.tokens * (1 - options.share)) - 40)]
            parts += [stored[n][:size] for n in order] + [text(40)]
            prompt = [token for part in parts for token in part]
            with_s, one, header = asked(
                client, prompt, cache_salt=SALT, vllm_xargs={"blending": "auto"}
            )
            without_s, other, _ = asked(client, prompt, cache_salt=secrets.token_hex(8))
            reuse.append(with_s)
            full.append(without_s)
            same += one == other
            told.add(header)
            print(f"prompt {number}: {with_s:.2f} s with reuse, {without_s:.2f} s without")
        status = client.get("/headrace/v1/status").raise_for_status().json()
        counts = [r["blending"] for r in status["replicas"] if r["role"] == "decode"]
    return {
        "reuse.ttft_vs_full": statistics.median(reuse) / statistics.median(full),
        "reuse.ttft_s": statistics.median(reuse),
        "reuse.full_s": statistics.median(full),
        "reuse.same_first_token": same / options.prompts,
        "reuse.counts": counts,
        "reuse.headers": sorted(told),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=6000, metavar="N")
    parser.add_argument("--share", type=float, default=0.8, metavar="SHARE")
    parser.add_argument("--budget", type=float, default=0.1, metavar="SHARE")
    parser.add_argument("--prompts", type=int, default=5, metavar="N")
    parser.add_argument("--policy", choices=("local", "remote", "cost"), default="local")
    options = parser.parse_args()
    found = measured(options)
    options.json.write_text(json.dumps({"figures": found}, indent=1))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

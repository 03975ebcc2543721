"""How right the predicted times to the first token are, on a running app.

    python -m benchmarks.predictions [--requests 200] [--json FILE]

Clients send streams with prompts of 20 to 1,500 words to an app of the default model; half of the
prompts begin with one of four shared texts. Each request's plan has the seconds that were predicted
for the chosen way, and those that the replica measured. The first requests teach the models of
times, and do not count.

Figures, for one client and for four at once:
    ratio_p10, ratio_p50, ratio_p90: measured seconds over predicted ones;
    within_half: share of the requests whose ratio is between 2/3 and 3/2;
    mean_measured_s, mean_predicted_s; remote: share of the requests that were prefilled remotely.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.instance import running_instance
from benchmarks.serving.environment import machine
from headrace.cli.show.explain import predicted_ttft_s

TEACHING = 40
"""Requests before those that count."""
TOKENS = 8
WORDS = ("river", "mill", "wheel", "water", "stone", "bridge", "grain", "winter", "gate", "field")


def prompt(rng: random.Random, shared: Sequence[str]) -> str:
    """Return a prompt of 20 to 1,500 words, every second one after a shared text."""
    words = " ".join(rng.choice(WORDS) for _ in range(int(20 * 75 ** rng.random())))
    start = rng.choice(shared) if rng.random() < 0.5 else ""
    return f"{start}{rng.randrange(10**6)} {words}\nSum it up."


def plan_of(url: str, model: str, text: str) -> dict[str, Any]:
    """Send a prompt, and return the plan of the request with what was measured."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            max_tokens=TOKENS,
            temperature=0.0,
            stream=True,
        )
        for _ in answer.parse():
            pass
    found = httpx.get(f"{url}/headrace/v1/plans/{answer.headers['x-request-id']}", timeout=30)
    found.raise_for_status()
    plan: dict[str, Any] = found.json()
    return plan


def figures(plans: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of these plans."""
    predicted = [predicted_ttft_s(plan) for plan in plans]
    measured = [float(plan["measured"]["ttft_s"]) for plan in plans]
    ratios = sorted(one / other for one, other in zip(measured, predicted, strict=True))
    tenths = statistics.quantiles(ratios, n=10)
    return {
        "requests": len(plans),
        "ratio_p10": tenths[0],
        "ratio_p50": tenths[4],
        "ratio_p90": tenths[8],
        "within_half": sum(2 / 3 <= ratio <= 3 / 2 for ratio in ratios) / len(ratios),
        "mean_measured_s": statistics.fmean(measured),
        "mean_predicted_s": statistics.fmean(predicted),
        "remote": sum(plan["kind"] == "remote" for plan in plans) / len(plans),
    }


def measure(url: str, model: str, requests: int) -> dict[str, dict[str, float]]:
    """Return the figures by the number of clients."""
    rng = random.Random(0)
    shared = [" ".join(rng.choice(WORDS) for _ in range(400)) + "\n" for _ in range(4)]
    found = {}
    for clients in (1, 4):
        texts = [prompt(rng, shared) for _ in range(TEACHING + requests)]
        print(f"{len(texts)} requests of {clients} at a time", flush=True)
        with ThreadPoolExecutor(clients) as pool:
            plans = list(pool.map(lambda text: plan_of(url, model, text), texts))
        counted = [plan for plan in plans[TEACHING:] if plan.get("measured")]
        found[f"c{clients}"] = figures(counted)
    return found


def main() -> int:
    """Run; print the figures, and write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions")
    parser.add_argument("--requests", type=int, default=200, help="that count, of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    with running_instance("predictions") as instance:
        found = measure(instance.endpoint, instance.model, args.requests)
    document = {"figures": found, "environment": machine()}
    print(json.dumps(document, indent=2))
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Effect of admission on the real app, at loads below and above its engines' capacity.

    python -m benchmarks.admission.app --json FILE

Two gateways, two prefill and two decode engines of a tiny model run on this machine's cores. Each
prompt is new. Load 1.0 is the rate that `CLIENTS` clients in a closed loop reach. A request is good
if it has its first token within `TARGET_S`.

    load_L.good_s                good requests a second; `plain.` without a class
    load_L.good_vs_best          over the maximum at any load with the class
    load_L.refused_share         refused at once, or given up after they had waited
    load_L.late_share            of those answered: first token after 1.1 times the target
    load_L.ttft_p50_s, _p99_s    of those answered
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np
import yaml

from benchmarks.client import run_first
from benchmarks.instance import running_instance
from benchmarks.serving.environment import machine
from headrace.gateway.admission.admission_controller import LATE
from tests.support.tiny import tiny_llama

TARGET_S = 2.0
CLIENTS = 8
PROMPT_TOKENS, ANSWER_TOKENS = 3000, 16
LOADS = (0.7, 0.9, 1.1, 1.3)
CONFIG: dict[str, Any] = {
    "model": {"id": "tiny"},
    "prefill": {"replicas": 2, "kv_cache_gb": 0.1, "engine": {"max_num_seqs": 32}},
    "decode": {"replicas": 2, "kv_cache_gb": 0.1, "engine": {"max_num_seqs": 32}},
    "gateway": {
        "replicas": 2,
        "admission": {"classes": {"quick": {"ttft_target_s": TARGET_S}}},
    },
}


def main() -> int:
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission.app")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each load")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    run_first()
    CONFIG["model"]["source"] = str(tiny_llama())
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(CONFIG, file)
        file.flush()
        with running_instance("admission", file=Path(file.name)) as instance:
            figures = asyncio.run(measure(instance.endpoint, args.seconds))
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "figures": figures}))
    return 0


async def measure(url: str, seconds: float) -> dict[str, Any]:
    """Return the figures of each load with the class, and of the last load without it."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, timeout=limit, connector=connector) as client:
        await closed_loop(client, 10.0)
        most = await closed_loop(client, 15.0)
        found: dict[str, Any] = {"closed_loop_s": most}
        for load in LOADS:
            found[f"load_{load}"] = await offered(client, load * most, "quick", seconds)
        found[f"plain.load_{LOADS[-1]}"] = await offered(client, LOADS[-1] * most, "", seconds)
        best = max(found[f"load_{load}"]["good_s"] for load in LOADS)
        for load in LOADS:
            of = found[f"load_{load}"]
            of["good_vs_best"] = of["good_s"] / best if best else None
        async with client.get("/headrace/v1/status") as answer:
            found["queue"] = (await answer.json())["gateway"]["queue"]
    return found


async def closed_loop(client: aiohttp.ClientSession, seconds: float) -> float:
    """Return the requests a second that clients get who ask again at once."""
    until_s, done = perf_counter() + seconds, 0

    async def ask_on() -> None:
        nonlocal done
        while perf_counter() < until_s:
            await ask(client, "")
            done += 1

    await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))
    return done / seconds


async def offered(
    client: aiohttp.ClientSession, rate: float, slo: str, seconds: float
) -> dict[str, float | None]:
    """Send requests at random moments and return the figures of their outcome."""
    draw, asked = random.Random(5), list[asyncio.Task[float | None]]()
    now_s = perf_counter()
    until_s, next_s = now_s + seconds, now_s
    while next_s < until_s:
        await asyncio.sleep(max(0.0, next_s - perf_counter()))
        asked.append(asyncio.create_task(ask(client, slo)))
        next_s += draw.expovariate(rate)
    ttfts = await asyncio.gather(*asked)
    answered = np.array([ttft for ttft in ttfts if ttft is not None])
    p50, p99 = np.quantile(answered, [0.5, 0.99]) if len(answered) else (None, None)
    return {
        "asked_s": len(ttfts) / seconds,
        "good_s": float((answered <= TARGET_S).sum()) / seconds,
        "refused_share": 1.0 - len(answered) / len(ttfts),
        "late_share": float((answered > LATE * TARGET_S).mean()) if len(answered) else None,
        "ttft_p50_s": p50,
        "ttft_p99_s": p99,
    }


async def ask(client: aiohttp.ClientSession, slo: str) -> float | None:
    """Return the seconds to the first token; None if the request was refused."""
    began_s, first_s = perf_counter(), None
    body = {
        "model": "tiny",
        "prompt": [random.randrange(300, 1800) for _ in range(PROMPT_TOKENS)],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"x-headrace-slo": slo} if slo else {}
    async with client.post("/v1/completions", json=body, headers=headers) as answer:
        if answer.status == 429:
            return None
        answer.raise_for_status()
        async for line in answer.content:
            if first_s is None and line.startswith(b"data:"):
                first_s = perf_counter() - began_s
    return first_s


if __name__ == "__main__":
    raise SystemExit(main())

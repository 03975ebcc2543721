"""Check of our own client against another project's: guidellm.

guidellm asks our gateway for the same answers to the same prompts, with as many streams, and its
figures are compared with ours. The engines are restarted for each client, so neither client finds
prompts in their caches.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.routers.arms import Arm, Cluster, python
from benchmarks.routers.engines import Settings
from benchmarks.routers.load import closed_loop
from benchmarks.routers.processes import ROOT, NotStartedError
from benchmarks.routers.replica import MODEL
from benchmarks.routers.words import VOCABULARY, text_of

NAME, PACKAGE = "guidellm", "guidellm==0.8.1"
INSTALL_HINT = (
    f"pip install --target $HEADRACE_ROUTER_PEERS/{NAME} --no-deps {PACKAGE} and what it needs "
    "beside torch and transformers: aiofiles aiologic culsans datasets dill eval_type_backport "
    "faker ftfy h2 hpack html5tagger hyperframe loguru more-itertools multiprocess pandas "
    "pydantic-settings sanic sanic-routing tabulate tracerite wcwidth xxhash"
)
STREAMS, REQUESTS, PROMPT_TOKENS, TOKENS = 8, 20, 2_000, 100
_LIMIT_S = 300.0


def compared(arm: Arm, settings: Settings, logs: Path, folder: Path) -> dict[str, float]:
    """Return the medians of both clients in ms, and theirs over ours.

    Args:
        folder: where guidellm is installed.

    Raises:
        NotStartedError: it failed; with its last words.
    """
    rng = np.random.default_rng(2)
    prompts = [
        text_of(rng.integers(0, VOCABULARY, PROMPT_TOKENS)) for _ in range(STREAMS * REQUESTS)
    ]
    with arm.start(settings, Path(), logs) as cluster:
        answers = uvloop.run(
            closed_loop(cluster.url, STREAMS, REQUESTS, TOKENS, prompts, seconds=0.0)
        )
    failed = [one.error for one in answers if one.error]
    if failed:
        raise NotStartedError(f"our client: {failed[0]}")
    ours = {
        "ttft_ms": 1e3 * statistics.median(one.ttft_s for one in answers),
        "token_ms": 1e3 * statistics.median(one.tpot_s for one in answers),
    }
    with arm.start(settings, Path(), logs) as cluster:
        theirs = _guidellm(cluster, settings, prompts, logs, folder)
    return {
        **{f"client.ours.{name}": value for name, value in ours.items()},
        **{f"client.{NAME}.{name}": value for name, value in theirs.items()},
        **{f"client.{name}_{NAME}_vs_ours": theirs[name] / ours[name] for name in ours},
    }


def _guidellm(
    cluster: Cluster, settings: Settings, prompts: list[bytes], logs: Path, folder: Path
) -> dict[str, float]:
    data, out = logs / "prompts.jsonl", logs / "guidellm.json"
    lines = ({"prompt": one.decode(), "output_tokens_count": TOKENS} for one in prompts)
    data.write_text("\n".join(map(json.dumps, lines)) + "\n")
    command = [sys.executable, "-m", NAME, "run", "--disable-console"]
    for option, value in (
        ("backend", f"openai_http,target={cluster.url},model={MODEL}"),
        ("profile", f"concurrent,streams={STREAMS}"),
        ("constraint", f"max_requests,count={len(prompts)}"),
        ("tokenizer", f"huggingface_auto,model={settings.folder}"),
        ("data", f"json_file,path={data}"),
        ("output", f"json,path={out}"),
    ):
        command += [f"--{option}", f"kind={value}"]
    command[command.index("--profile") - 1] += ",request_format=/v1/completions"
    done = subprocess.run(
        command,
        env={**os.environ, **python(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode or not out.exists():
        raise NotStartedError(f"{NAME} said: {done.stderr[-800:]}")
    metrics: dict[str, Any] = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    if metrics["request_totals"]["successful"] != len(prompts):
        raise NotStartedError(f"{NAME} counted {metrics['request_totals']}")
    return {
        "ttft_ms": float(metrics["time_to_first_token_ms"]["successful"]["median"]),
        # Over the tokens after the first, as in our client.
        "token_ms": float(metrics["inter_token_latency_ms"]["successful"]["median"]),
    }

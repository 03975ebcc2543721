"""CPU time of an app without requests.

    python -m benchmarks.idle [--seconds N] --json FILE

Starts the laptop's app as a user does (`headrace up --detach`: a prefill and a decode engine, the
KV store, the gateway), has one prompt prefilled remotely so that the engines are connected, waits,
and adds up the CPU time of every process over a minute.

    idle.app_cores     engines, replicas, gateway, StoreNode, deployment store: all that is added
    idle.ray_cores     Ray's daemons and Serve's controller
    idle.total_cores   both
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.idle.cpu import RAY, busiest, by_part, look
from benchmarks.instance import running_instance
from benchmarks.serving.environment import environment

SETTLE_S, SECONDS = 30.0, 60.0
THREADS_SHOWN = 12
TARGET_APP_CORES = 0.10


def main() -> int:
    """Measure, print, write; 1 if the app did not start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the measurement")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds to wait before it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as in headrace up"
    )
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    from headrace.model import resolve

    model = resolve(args.model)
    try:
        with running_instance("idle", args.set, model) as instance:
            _connect_engines(instance.endpoint, instance.model)
            time.sleep(args.settle)
            processes = list(instance.matcher().processes().values())
            first = look(processes)
            time.sleep(args.seconds)
            last = look(processes)
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    parts = by_part(first, last)
    threads = busiest(first, last, THREADS_SHOWN)
    ray_cores, total = parts.get(RAY, 0.0), sum(parts.values())
    figures = {
        "idle.app_cores": total - ray_cores,
        "idle.ray_cores": ray_cores,
        "idle.total_cores": total,
    }
    about = environment(model)
    print(_table(figures, parts, about))
    print("Busiest threads:")
    for thread, cores in threads:
        print(f"  {cores:6.4f}  {thread.part:24} {thread.pid:>8} {thread.name}")
    if args.json:
        document = {
            "figures": {key: round(value, 4) for key, value in figures.items()},
            "parts": {part: round(cores, 4) for part, cores in sorted(parts.items())},
            "threads": [
                {"part": t.part, "name": t.name, "cores": round(cores, 4)} for t, cores in threads
            ],
            "environment": about,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _table(figures: dict[str, float], parts: dict[str, float], about: dict[str, Any]) -> str:
    lines = [f"\n{about['date']}, {about['cpu']}, {about['cores']} cores.\n"]
    lines += ["| part | cores |", "|---|---:|"]
    lines += [f"| {part} | {parts[part]:.4f} |" for part in sorted(parts, key=lambda p: -parts[p])]
    lines += [f"| `{key}` | {value:.4f} |" for key, value in figures.items()]
    return "\n".join([*lines, f"\n`idle.app_cores` should be at most {TARGET_APP_CORES:.2f}.\n"])


def _connect_engines(endpoint: str, model: str) -> None:
    """Have one prompt prefilled remotely: engines that have met may idle in another way."""
    with httpx.Client(base_url=endpoint, timeout=180.0) as client:
        client.put("/headrace/v1/router", json={"policy": "remote"}).raise_for_status()
        body = {"model": model, "prompt": "water " * 600, "max_tokens": 4, "temperature": 0}
        client.post("/v1/completions", json=body).raise_for_status()
        client.put("/headrace/v1/router", json={"policy": "cost"}).raise_for_status()
        moved = client.get("/headrace/v1/status").raise_for_status().json().get("nixl_bytes", 0)
    if not moved:
        raise RuntimeError("no KV was moved between the engines")


if __name__ == "__main__":
    sys.exit(main())

"""Many long prompts: what a router adds to a first token while 1,200 streams of 220 KB run at once.

Each client asks again when it was answered. Engines answer at once and then every `GAP_S`, so all
streams run at the same time and 40 new requests come a second: the time of a first token is the
router's, the kernel's and this client's. The first request of each client only fills the streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.routers.arms import Arm
from benchmarks.routers.engines import Settings
from benchmarks.routers.load import Answer, closed_loop
from benchmarks.routers.processes import NotStartedError
from benchmarks.routers.words import VOCABULARY, text_of

STREAMS, PROMPT_TOKENS, PROMPTS = 1200, 55_000, 64
GAP_S, TOKENS = 1.0, 30


@dataclass(frozen=True, slots=True)
class Waits:
    """The times to a first token, in ms, and the router's CPU ms a request."""

    p50: float
    p99: float
    cpu_ms: float
    failed: float


def measure(
    arm: Arm, settings: Settings, place: tuple[Path, Path], streams: int = STREAMS
) -> Waits:
    """Measure one router.

    Args:
        place: the router's folder, and the folder for logs.

    Raises:
        NotStartedError: it did not start, or answered no request.
    """
    settings = replace(settings, gap_s=GAP_S)
    rng = np.random.default_rng(0)
    prompts = [text_of(rng.integers(0, VOCABULARY, PROMPT_TOKENS)) for _ in range(PROMPTS)]
    with arm.start(settings, *place) as cluster:
        before_s = sum(one.cpu_s() for one in cluster.router)
        answers: list[Answer] = uvloop.run(
            closed_loop(cluster.url, streams, 2, TOKENS, prompts, GAP_S * TOKENS)
        )
        cpu_s = sum(one.cpu_s() for one in cluster.router) - before_s
    second = sorted(answers, key=lambda one: one.due_s)[streams:]
    times_ms = [1e3 * one.ttft_s for one in second if not one.error]
    if not times_ms:
        raise NotStartedError(f"no request was answered: {answers[0].error}")
    failed = sum(bool(one.error) for one in answers) / len(answers)
    p50, p99 = np.percentile(times_ms, (50, 99)).tolist()
    return Waits(p50, p99, 1e3 * cpu_s / len(answers), failed)


def figures(found: dict[str, Waits], direct: Waits) -> dict[str, float]:
    """Return what each router adds to the times without a router."""
    told = {"long.direct.ttft_ms_p50": direct.p50, "long.direct.ttft_ms_p99": direct.p99}
    for name, one in found.items():
        told |= {
            f"long.{name}.added_ms_p50": one.p50 - direct.p50,
            f"long.{name}.added_ms_p99": one.p99 - direct.p99,
            f"long.{name}.cpu_ms": one.cpu_ms,
            f"long.{name}.failed": one.failed,
        }
    return told

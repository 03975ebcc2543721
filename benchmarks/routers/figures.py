"""Figures of a router's run, and ours against the best of the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.routers.load import Answer


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets that a request must meet to count for goodput: its first token within `ttft_s` plus
    `ttft_token_s` for each token of its prompt, and `itl_s` a token after it, on average."""

    ttft_s: float = 2.0
    ttft_token_s: float = 1e-4
    itl_s: float = 0.05

    def times(self, slow: float) -> Targets:
        """Return the targets for engines that are `slow` times as slow."""
        return Targets(slow * self.ttft_s, slow * self.ttft_token_s, slow * self.itl_s)

    def kept(self, answer: Answer) -> bool:
        """Return whether a request met the targets."""
        return (
            not answer.error
            and answer.ttft_s <= self.ttft_s + self.ttft_token_s * answer.prompt
            and answer.tpot_s <= self.itl_s
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one router's measured requests, in seconds; `goodput` and `errors` are shares."""

    requests: int
    errors: float
    goodput: float
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_mean: float
    itl_p99: float
    tpot_p90: float
    hit_rate: float
    busy: float
    busy_most: float
    router_cpu_s: float
    router_cpu_ms_a_request: float
    engine_cpu_s: float
    engine_late_ms: float
    engine_lost_s: float
    sent_late_ms_p99: float

    def figures(self, name: str) -> dict[str, float]:
        """By their names."""
        return {f"{name}.{field}": value for field, value in asdict(self).items()}


def outcome(
    answers: Sequence[Answer],
    targets: Targets,
    *,
    before: Sequence[Mapping[str, float]],
    after: Sequence[Mapping[str, float]],
    seconds: float,
    router_cpu_s: float,
    engine_cpu_s: float,
) -> Outcome:
    """The figures of measured requests. One that failed counts as no first token: it is left out of
    the times, and breaks the targets.

    Args:
        before, after: the engines' counts. seconds: between them.
    """
    good = [one for one in answers if not one.error]
    ttft = np.array([one.ttft_s for one in good] or [0.0])
    gaps = np.concatenate([np.array(one.gaps_s) for one in good] or [np.zeros(1)])
    gaps = gaps if len(gaps) else np.zeros(1)
    p50, p90, p99 = np.percentile(ttft, [50, 90, 99]).tolist()
    grown = [
        {name: late[name] - early[name] for name in early}
        for early, late in zip(before, after, strict=True)
    ]
    prompts = sum(one["prompt_tokens"] for one in grown)
    steps = sum(one["steps"] for one in grown)
    busy = [one["busy_s"] / seconds for one in grown]
    late = [one.sent_s - one.due_s for one in answers]
    return Outcome(
        requests=len(answers),
        errors=1.0 - len(good) / max(1, len(answers)),
        goodput=sum(map(targets.kept, answers)) / max(1, len(answers)),
        ttft_mean=float(ttft.mean()),
        ttft_p50=p50,
        ttft_p90=p90,
        ttft_p99=p99,
        itl_mean=float(gaps.mean()),
        itl_p99=float(np.percentile(gaps, 99)),
        tpot_p90=float(np.percentile([one.tpot_s for one in good] or [0.0], 90)),
        hit_rate=sum(one["cached_tokens"] for one in grown) / max(prompts, 1),
        busy=float(np.mean(busy)),
        busy_most=float(np.max(busy)),
        router_cpu_s=router_cpu_s,
        router_cpu_ms_a_request=1e3 * router_cpu_s / max(1, len(answers)),
        engine_cpu_s=engine_cpu_s,
        engine_late_ms=1e3 * sum(one["late_s"] for one in grown) / max(steps, 1),
        engine_lost_s=sum(one["lost_s"] for one in grown),
        sent_late_ms_p99=1e3 * float(np.percentile(late, 99)),
    )


def against(ours: Outcome, peers: Mapping[str, Outcome]) -> dict[str, float]:
    """Ours divided by the best peer's."""
    if not peers:
        return {}
    p90 = min(one.ttft_p90 for one in peers.values())
    mean = min(one.ttft_mean for one in peers.values())
    good = max(one.goodput for one in peers.values())
    return {
        "conversation.ttft_p90_vs_best_peer": ours.ttft_p90 / max(p90, 1e-9),
        "conversation.ttft_mean_vs_best_peer": ours.ttft_mean / max(mean, 1e-9),
        "conversation.goodput_vs_best_peer": ours.goodput / max(good, 1e-9),
    }


COLUMNS = {
    "goodput": ("goodput", "{:.3f}"),
    "TTFT mean s": ("ttft_mean", "{:.2f}"),
    "p50": ("ttft_p50", "{:.2f}"),
    "p90": ("ttft_p90", "{:.2f}"),
    "p99": ("ttft_p99", "{:.2f}"),
    "ITL p99 ms": ("itl_p99", "{:.0f}"),
    "hits": ("hit_rate", "{:.3f}"),
    "errors": ("errors", "{:.4f}"),
    "busy, most": ("busy_most", "{:.2f}"),
    "router CPU ms a request": ("router_cpu_ms_a_request", "{:.1f}"),
}


def table(found: Mapping[str, Outcome]) -> str:
    """Return Markdown: a line a router."""
    lines = ["| router | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, one in found.items():
        cells = []
        for field, form in COLUMNS.values():
            value = getattr(one, field) * (1e3 if field.startswith("itl") else 1.0)
            cells.append(form.format(value))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)

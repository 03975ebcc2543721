"""Exponentially decaying averages of the requests' costs, for `disaggregation.TrafficLoad`."""

from __future__ import annotations

from dataclasses import replace

from headrace.disaggregation import TrafficLoad

_MEANS = (
    *("prompt_tokens", "answer_tokens", "local_s", "local_square"),
    *("remote_s", "remote_square", "move_s"),
)


def decayed_average(before: TrafficLoad | None, now: TrafficLoad, part: float) -> TrafficLoad:
    """Return exponentially decaying means of means over the last few requests.

    Args:
        before: the averages so far; None for none.
        now: means over the last few requests.
        part: weight of `now` in the result.
    """
    if before is None:
        return now
    means = {
        name: getattr(before, name) + part * (getattr(now, name) - getattr(before, name))
        for name in _MEANS
    }
    held = now.most_running * (now.prompt_tokens + now.answer_tokens / 2)
    tokens = max(1.0, means["prompt_tokens"] + means["answer_tokens"] / 2)
    return replace(now, **means, most_running=max(1, round(held / tokens)))

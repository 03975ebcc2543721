"""Accuracy of predicted step times: ``python -m benchmarks.step_time [--json FILE]``.

Replays the steps of a real engine (`steps.csv`, made by `benchmarks.step_time.record`) in order:
each model predicts a step, then learns it. Errors are relative; the first 50 steps of each model
are left out. `step_time` is the current model; the others are earlier ones (`peers`). Models of
prompts only get the steps that have only prompts.

Then a simulated machine halves its speed: the error of decode steps 10, 100 and 500 steps later.
No engine, no network; a minute.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.step_time.peers import Curve, GateLine, Line, Model, Pairs, Shape
from headrace_engine.step_time import StepTime, pairs_of

STEPS = Path(__file__).with_name("steps.csv")
WARM = 50
KINDS: Mapping[str, Callable[[Shape], bool]] = {
    "decode": lambda s: not s.prompt and not s.draft,
    "drafted": lambda s: not s.prompt and s.draft > 0,
    "prompt": lambda s: s.prompt > 0 and not s.rows,
    "mixed": lambda s: s.prompt > 0 and s.rows > 0,
}


class Now:
    """`StepTime` as a `Model`."""

    def __init__(self) -> None:
        self.fit = StepTime()

    def seconds(self, shape: Shape) -> float:
        return self.fit.seconds(*shape)

    def observe(self, shape: Shape, seconds: float) -> None:
        self.fit.observe(*shape, seconds)


MODELS: Mapping[str, Callable[[], Model]] = {"step_time": Now, "line": Line, "curve": Curve}
PROMPT_MODELS: Mapping[str, Callable[[], Model]] = {"step_time_prompts": Now, "pairs": Pairs}


def recorded(file: Path) -> list[tuple[Shape, float]]:
    """Steps: shapes and seconds. A row's context counts once, however many tokens it verifies."""
    found = []
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            rows, draft = float(row["rows"]), float(row["draft"])
            context = float(row["context"]) / (1.0 + draft / max(rows, 1.0))
            shape = Shape(float(row["prompt"]), rows, draft, context, float(row["pairs"]))
            found.append((shape, float(row["seconds"])))
    return found


def replay(model: Model, steps: list[tuple[Shape, float]]) -> dict[str, float]:
    """Return the median and root mean square of log(predicted / measured), by kind of step."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number, (shape, seconds) in enumerate(steps):
        if number >= WARM:
            [kind] = [name for name, holds in KINDS.items() if holds(shape)]
            errors[kind].append(math.log(max(model.seconds(shape), 1e-6) / seconds))
        model.observe(shape, seconds)
    found = {}
    for kind, values in errors.items():
        if values:
            found[f"{kind}.median"] = float(np.median(np.abs(values)))
            found[f"{kind}.rms"] = float(np.sqrt(np.mean(np.square(values))))
    return found


def halved(make: Callable[[], Model], after: int, seeds: int = 8) -> float:
    """Return the mean error of decode steps so many steps after a machine's speed has halved."""
    errors = []
    for seed in range(seeds):
        rng, model = np.random.default_rng(seed), make()
        for number in range(500 + after):
            prompt, rows = int(rng.choice([0, 0, 0, 0, 50, 500, 2000])), int(rng.integers(1, 9))
            seconds = (1.0 + (number >= 500)) * law_s(prompt, rows)
            shape = Shape(prompt, rows, 0, 0, pairs_of(0, prompt))
            model.observe(shape, seconds * (1.0 + 0.05 * rng.standard_normal()))
        errors += [
            abs(model.seconds(Shape(0, rows, 0, 0, 0)) / (2.0 * law_s(0, rows)) - 1.0)
            for rows in (1, 2, 4, 8)
        ]
    return float(np.mean(errors))


def law_s(prompt: int, rows: int) -> float:
    """Return the seconds of a simulated machine's step."""
    return 0.012 + 0.00004 * prompt + 0.0008 * rows + 1e-9 * prompt**2


def measure(file: Path) -> dict[str, float]:
    """Return all figures."""
    steps = recorded(file)
    with_prompts = [step for step in steps if step[0].prompt]
    found: dict[str, float] = {}
    for models, seen in ((MODELS, steps), (PROMPT_MODELS, with_prompts)):
        for name, make in models.items():
            for figure, value in replay(make(), seen).items():
                found[f"{name}.{figure}"] = value
    now, gate, began_s = Now(), GateLine(), time.perf_counter()
    for shape, seconds in steps:
        now.observe(shape, seconds)
    found["step_time.observe_us"] = 1e6 * (time.perf_counter() - began_s) / len(steps)
    for shape, seconds in with_prompts:
        gate.observe(shape, seconds)
    found["gate.free_tokens"] = now.fit.free_tokens()
    found["gate.free_tokens_before"] = gate.free_tokens()
    found["gate.free_tokens_by_least_squares"] = least_squares_tokens(with_prompts)
    for name, make in MODELS.items():
        for after in (10, 100, 500):
            found[f"{name}.halved_{after}"] = halved(make, after)
    return found


def least_squares_tokens(steps: list[tuple[Shape, float]]) -> float:
    """a / b of a + b prompt + c rows + d draft + e context + f pairs over all steps at once,
    outliers weighed down."""
    x = np.array([(1.0, *shape) for shape, _ in steps])
    y = np.array([seconds for _, seconds in steps])
    weight = 1.0 / y
    for _ in range(10):
        theta = np.linalg.lstsq(x * weight[:, None], y * weight, rcond=None)[0]
        weight = 1.0 / y / np.maximum(1.0, np.abs(x @ theta / y - 1.0) / 0.05)
    return float(theta[0] / theta[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="How well step times are predicted.")
    parser.add_argument("--steps", type=Path, default=STEPS, metavar="FILE", help="recorded steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    found = measure(args.steps)
    for name, value in found.items():
        print(f"{name:40} {value:10.4f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

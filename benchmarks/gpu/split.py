"""Prefill and decode as two engines on one card, against one engine that does both.

The model has the shape of Llama 3 8B with random weights (`models`). Three engines share the card's
time, each in its own process with a part of the memory: one that does both, one that prefills, and
one that pulls over NIXL, within the card, and decodes. Some requests decode all the time while
prompts arrive one after another, in turns at the one engine and at the two. Prompts arrive so fast
that computing them takes `Load.busy` of the one engine's time. Chunks have vLLM's default size.

The loss with two engines: they take turns on the card, and KV is copied. The gain: a prompt's
chunks are in no decode step. Every first token comes from the engine that decodes. vLLM tells for
each step of that engine whether it ran as one full graph.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import quantile
from benchmarks.gpu.engine import make_llm
from benchmarks.gpu.models import prompt as random_prompt
from benchmarks.gpu.parts import Report
from benchmarks.gpu.timing import DEVICE
from benchmarks.kvstore.child import Child, serve
from headrace_engine.kv_transfer.handoff import PARAMS_KEY, produce_params, pull_params
from headrace_engine.kv_transfer.ports import free_port_block

ARMS = ("one", "two")
FULL = "FULL"
"""vLLM's name of a step that is one graph."""
ENDLESS = 10**9
"""Tokens of a request that is there until it is aborted, if the model's positions allow."""


@dataclass(frozen=True)
class Load:
    """Load on the engines.

    Attributes:
        running: number of requests that decode all the time.
        prompts, prompt_tokens, answer_tokens: number and sizes of the requests that arrive during
            that, in each turn.
        turns: number of turns of each arm, after one that warms up.
        busy: share of the time that the one engine computes prompts.
    """

    running: int = 8
    prompts: int = 12
    prompt_tokens: int = 4096
    answer_tokens: int = 32
    turns: int = 4
    busy: float = 0.5


SMALL = Load(running=2, prompts=3, prompt_tokens=512, answer_tokens=4, turns=1, busy=0.2)


class GraphModes:
    """Counts an engine's steps by the kind of their CUDA graphs, in the place of vLLM's loggers."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def record(self, scheduler_stats: Any = None, **rest: Any) -> None:
        """Implement `StatLoggerManager.record`."""
        stats = getattr(scheduler_stats, "cudagraph_stats", None)
        if stats is not None:
            self._steps[stats.runtime_mode] = self._steps.get(stats.runtime_mode, 0) + 1

    def log(self) -> None:
        """Implement `StatLoggerManager.log`."""

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        taken, self._steps = self._steps, {}
        return taken


class Engine:
    """vLLM in this process. `run` steps it, in the thread that made it; the rest is called from
    another one."""

    def __init__(self, memory: float) -> None:
        connector = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "headrace_engine.pull_proof.connector",
            "kv_buffer_device": DEVICE,
        }
        options = {"disable_log_stats": False, "cudagraph_metrics": True}
        self._engine = make_llm(connector, memory=memory, **options).llm_engine
        self._modes = GraphModes()
        self._engine.logger_manager = self._modes
        self._positions = self._engine.vllm_config.model_config.max_model_len
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._times: dict[str, list[float]] = {}
        self._found: dict[str, int] = {}
        self._ended: dict[str, queue.SimpleQueue[Any]] = {}

    # The engine's thread

    def run(self) -> None:
        """Step until it is closed."""
        while True:
            busy = self._engine.has_unfinished_requests()
            try:
                while (command := self._commands.get(block=not busy)) is not None:
                    command()
                    busy = True
                return
            except queue.Empty:
                self._step()

    def _step(self) -> None:
        outputs, now_s = self._engine.step(), time.monotonic()
        for output in outputs:
            name = output.request_id
            self._times[name].append(now_s)
            self._found[name] = output.num_cached_tokens or 0
            if output.finished:
                self._ended[name].put(output.kv_transfer_params)

    # Commands

    def modes(self) -> dict[str, int]:
        """Return the number of steps by vLLM's name of their graphs, since the last call."""
        return self._modes.take()

    def add(
        self, name: str, prompt: list[int], tokens: int, transfer: dict[str, Any] | None = None
    ) -> None:
        """Begin to answer; `transfer` says where its KV is."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=min(tokens, self._positions - len(prompt)),
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if transfer is None else {PARAMS_KEY: pull_params(transfer)},
        )
        self._times[name], self._ended[name] = [], queue.SimpleQueue()
        given: Any = {"prompt_token_ids": prompt}
        self._commands.put(lambda: self._engine.add_request(name, given, params))

    def prefill(self, name: str, prompt: list[int]) -> Any:
        """Compute a prompt and keep its KV; with what another engine pulls it."""
        self.add(name, prompt, 1, produce_params())
        return self.wait(name)["transfer"]

    def wait(self, name: str) -> dict[str, Any]:
        """Until a request has ended: when its tokens came (time.monotonic), how many of its
        prompt's were found, and with what its KV is pulled."""
        transfer = self._ended[name].get()
        del self._ended[name]
        times, found = self._times.pop(name), self._found.pop(name)
        return {"times": times, "found": found, "transfer": transfer}

    def abort(self, names: list[str]) -> list[list[float]]:
        """End requests; when their tokens came."""
        done = threading.Event()

        def end() -> None:
            self._engine.abort_request(names)
            done.set()

        self._commands.put(end)
        done.wait()
        for name in names:
            del self._ended[name]
        return [self._times.pop(name) for name in names]

    def close(self) -> None:
        self._commands.put(None)


class Arm:
    """One engine, or two."""

    def __init__(self, decode: Child, prefill: Child | None) -> None:
        self._decode, self._prefill = decode, prefill
        self._number = itertools.count()

    def turn(self, load: Load, every_s: float, seed: int) -> dict[str, list[float]]:
        """Return the seconds to first tokens, the gaps between the tokens of running requests, and
        the share of steps that were not one graph, meanwhile."""
        running = [f"running-{next(self._number)}" for _ in range(load.running)]
        for n, name in enumerate(running):
            self._decode.do("add", name=name, prompt=random_prompt(64, seed + n), tokens=ENDLESS)
        time.sleep(min(2.0, every_s))
        self._decode.do("modes")
        began_s = time.monotonic()
        comes_s: dict[str, float] = {}
        for n in range(load.prompts):
            name = f"prompt-{next(self._number)}"
            comes_s[name] = began_s + n * every_s
            time.sleep(max(0.0, comes_s[name] - time.monotonic()))
            self._ask(name, random_prompt(load.prompt_tokens, seed + 1000 + n), load.answer_tokens)
        answers = {name: self._decode.do("wait", name=name) for name in comes_s}
        ended_s, modes = time.monotonic(), self._decode.do("modes")
        if self._prefill and min(each["found"] for each in answers.values()) == 0:
            raise RuntimeError("KV was computed again, not pulled")
        ttft_s = [answers[name]["times"][0] - at_s for name, at_s in comes_s.items()]
        gaps_s = [
            later - earlier
            for times in self._decode.do("abort", names=running)
            for earlier, later in itertools.pairwise(times)
            if began_s <= earlier and later <= ended_s
        ]
        share = 1 - modes.get(FULL, 0) / max(1, sum(modes.values()))
        return {"ttft_s": ttft_s, "itl_s": gaps_s, "without_full_graph": [share]}

    def _ask(self, name: str, prompt: list[int], tokens: int) -> None:
        transfer = None
        if self._prefill:
            transfer = self._prefill.do("prefill", name=name, prompt=prompt)
        self._decode.do("add", name=name, prompt=prompt, tokens=tokens, transfer=transfer)


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Return the seconds by arm."""
    load, found = SMALL if dry else Load(), dict[str, Any]()
    with ExitStack() as stack:
        # One after another: vLLM measures the card's free memory when it starts.
        one, prefill, decode = [stack.enter_context(_engine()) for _ in range(3)]
        arms = {"one": Arm(one, None), "two": Arm(decode, prefill)}
        alone = Load(running=0, prompts=1, prompt_tokens=load.prompt_tokens, answer_tokens=1)
        for name in ARMS:
            arms[name].turn(alone, 0.0, seed=1)
        alone_s = min(arms["one"].turn(alone, 0.0, seed=s)["ttft_s"][0] for s in (2, 3, 4))
        every_s = alone_s / load.busy
        kinds = ("ttft_s", "itl_s", "without_full_graph")
        taken: dict[str, Any] = {arm: {kind: [] for kind in kinds} for arm in ARMS}
        for turn in range(load.turns + 1):
            for arm in ARMS:
                part = arms[arm].turn(load, every_s, seed=10_000 * (turn + 1))
                for name, values in part.items():
                    taken[arm][name] += values if turn else []
            if turn:
                found = _summary(load, alone_s, every_s, taken)
                report(found)
    return found


def _summary(
    load: Load, alone_s: float, every_s: float, taken: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "alone_s": alone_s,
        "every_s": every_s,
        "running": load.running,
        "prompt_tokens": load.prompt_tokens,
        **{
            f"{arm}.{name}_p{p}_s": quantile(taken[arm][f"{name}_s"], p / 100)
            for arm in ARMS
            for name in ("ttft", "itl")
            for p in (50, 99)
        },
        **{f"{arm}.itl_mean_s": statistics.fmean(taken[arm]["itl_s"]) for arm in ARMS},
        **{
            f"{arm}.without_full_graph": statistics.fmean(taken[arm]["without_full_graph"])
            for arm in ARMS
        },
    }


@contextmanager
def _engine() -> Iterator[Child]:
    """An engine, which has started."""
    port = free_port_block(1, "127.0.0.1")
    environment = os.environ | {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        child = Child("split", {"memory": 0.28}, environment, log, "benchmarks.gpu.")
        try:
            child.answer()
            yield child
        finally:
            child.end()


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Two engines over one, and the shares of steps."""
    shares = {"split": "two", "one": "one"}
    return {
        f"{name}_steps_without_full_graph": found[f"{arm}.without_full_graph"]
        for name, arm in shares.items()
    } | {
        f"split_{name}_p{p}_vs_one": found[f"two.{name}_p{p}_s"] / found[f"one.{name}_p{p}_s"]
        for name in ("ttft", "itl")
        for p in (50, 99)
    }


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table of the figures, and a description of the load."""
    lines = [
        "| engines | TTFT p50, ms | p99 | ITL of running requests p50, ms | p99 | mean "
        "| steps without a full graph |",
        "|---|" + "---:|" * 6,
    ]
    for arm in ARMS:
        names = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "itl_mean")
        times = " | ".join(f"{1e3 * found[f'{arm}.{name}_s']:.1f}" for name in names)
        lines.append(f"| {arm} | {times} | {found[f'{arm}.without_full_graph']:.0%} |")
    lines.append(
        f"\n{found['running']} requests decode while a prompt of {found['prompt_tokens']:,} tokens "
        f"comes every {1e3 * found['every_s']:.0f} ms; alone it takes one engine "
        f"{1e3 * found['alone_s']:.0f} ms to its first token."
    )
    return "\n".join(lines)


def main() -> None:
    """Be an engine's own process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=float, required=True)
    memory = parser.parse_args().memory
    engine = Engine(memory)
    threading.Thread(target=_commands, args=(engine,), daemon=True).start()
    engine.run()


def _commands(engine: Engine) -> None:
    """Do what stdin says; the process ends with it, whatever its main thread waits for."""
    try:
        serve(lambda: engine)
    finally:
        engine.close()


if __name__ == "__main__":
    main()

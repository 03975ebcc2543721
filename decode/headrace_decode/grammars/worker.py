"""The process that tries grammars (`python -m headrace_decode.grammars.worker`).

`trials` starts it. It loads vLLM and the model's tokenizer once. For each grammar it forks a child
with limits on processor time, clock time and memory (`limits`). The child checks the grammar with
vLLM's own rules, compiles it with vLLM's own backend, and follows it for some tokens. If the child
crashes or exceeds a limit, the grammar is refused. Two ends show nothing about the grammar, and the
trial is unfinished: the clock ran out, or another process killed the child.

Trials run at the same time, each watched by a thread. `trials` limits their number.

Its input is the length and the pickled vLLM configuration, then a JSON object a line:
`{"id": number, "spec": grammar}`. Its output is `ready`, then a JSON object a line with the same
`id`: `{"spec": ..., "bytes": ...}`, `{"refused": message}` or `{"unfinished": message}`. It ends
with its input.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import faulthandler
import json
import math
import os
import pickle
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Protocol

import numpy as np

from headrace_decode.grammars import limits
from headrace_decode.grammars.keywords import named, unenforced

STACK_BYTES = 4 * 2**20
"""Half the stack of a thread of the engine: a recursion that would be too deep there crashes here.
"""
PR_SET_PDEATHSIG = 1
NICE, NICEST = 10, 19
"""Niceness of the worker, and the highest, which is that of its trials."""

TokenChooser = Callable[[Sequence[int]], int]
"""Function that chooses a walk's next token among the allowed ones."""
TOKEN_CHOOSERS: tuple[TokenChooser, ...] = (itemgetter(0), itemgetter(-1), Random(1).choice)

Answer = dict[str, Any]
Spec = Mapping[str, Any]


@dataclass(frozen=True)
class TrialLimits:
    """The limits of one child."""

    cpu_s: int = limits.COMPILE_CPU_S
    wall_s: float = limits.COMPILE_WALL_S
    added_bytes: int = limits.COMPILE_BYTES
    max_answer_bytes: int = limits.ANSWER_BYTES


class Matcher(Protocol):
    """One way through a compiled grammar."""

    def allowed(self) -> Sequence[int]:
        """Return the tokens that may come next, without the end token; empty at the end."""

    def accept(self, token: int) -> bool:
        """Continue with this token; return False if that is not possible."""


def run_confined(work: Callable[[], Answer], trial_limits: TrialLimits) -> Answer:
    """Run `work` in a forked child; return its answer, or why it gave none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(work, trial_limits, writer)
    os.close(writer)
    data, end = b"", "failed"
    try:
        until_s = time.monotonic() + trial_limits.wall_s
        with _CpuThrottle(pid) as throttle:
            data, end = _read(reader, until_s, trial_limits.max_answer_bytes, throttle)
    finally:
        os.close(reader)
        # A child that closed its pipe without an answer is ending, and its status says why.
        died = end == "closed" and not data
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT if died else signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if data:
        with contextlib.suppress(ValueError):
            answer = json.loads(data)
            if isinstance(answer, dict):
                return answer
    if end == "late":
        return _unfinished(f"its trial did not end within {trial_limits.wall_s:g} s")
    died_of = os.WTERMSIG(status) if died and os.WIFSIGNALED(status) else None
    if died_of == signal.SIGKILL:
        return _unfinished("another process killed its trial")
    if died_of == signal.SIGXCPU:
        return _refused(
            f"it takes more than {trial_limits.cpu_s} s to compile; use a simpler or shorter one"
        )
    return _refused("compiling it takes too much memory or recursion; use a simpler one")


def walk(matcher: Matcher, pick: TokenChooser, tokens: int, step_s: float) -> str | None:
    """Follow a grammar for some tokens.

    Returns:
        Why the grammar is too slow to follow; None if it is not.
    """
    for done in range(tokens):
        began = time.thread_time()
        allowed = matcher.allowed()
        can_continue = len(allowed) > 0 and matcher.accept(int(pick(allowed)))
        if time.thread_time() - began > step_s:
            return (
                f"following it takes more than {step_s:g} s a token after {done} tokens; make it "
                "unambiguous, or use a simpler one"
            )
        if not can_continue:
            return None
    return None


class Compiler:
    """vLLM's check and compilation of a grammar.

    Args:
        config: vLLM's configuration of the engine.
    """

    def __init__(self, config: Any) -> None:
        # vLLM logs to standard output when it is imported. `main` has redirected that by now.
        from headrace_decode.grammars.combined_backend import is_backend_automatic
        from headrace_engine.extensions.scheduler import why_no_extensions
        from headrace_engine.vllm.structured_output import grammar_tokenizer

        self._config = config
        self._tokenizer = grammar_tokenizer(config.model_config)
        # An engine with another scheduler has only the backend of its first grammar.
        self._combined = why_no_extensions(config) is None and is_backend_automatic(config)
        self._backends: dict[str, Any] = {}
        for name in ("combined",) if self._combined else ("xgrammar",):
            self._backends[name] = self._backend(name)
        if self._combined:
            self._backends["combined"].prepare(wait=True)

    def _backend(self, name: str) -> Any:
        from headrace_decode.grammars.combined_backend import CombinedBackend
        from headrace_engine.vllm.structured_output import backend_class

        size = self._config.model_config.get_vocab_size()
        make = CombinedBackend if name == "combined" else backend_class(name)
        return make(self._config, tokenizer=self._tokenizer, vocab_size=size)

    def __call__(self, spec: Spec) -> Answer:
        """Check, compile and follow a grammar; return it as vLLM's check changed it."""
        from vllm.sampling_params import StructuredOutputsParams

        from headrace_engine.vllm.structured_output import chosen_backend, grammar_key

        try:
            wanted = StructuredOutputsParams(**spec)
            if (why := self._check(wanted)) is not None:
                return _refused(why)
            kind, text = grammar_key(wanted)
            chosen = chosen_backend(wanted)[0] or "xgrammar"
            automatic = self._config.structured_outputs_config.backend == "auto"
            names = {chosen, "xgrammar"} if automatic else {chosen}
            for name in ("combined",) if self._combined else names:
                backend = self._backends.get(name) or self._backend(name)
                for pick in TOKEN_CHOOSERS:
                    matcher = _GrammarMatcher(
                        backend.compile_grammar(kind, text),
                        backend.allocate_token_bitmask(1),
                        self._tokenizer.eos_token_id,
                    )
                    slow = walk(matcher, pick, limits.WALK_TOKENS, limits.MASK_S)
                    if slow is not None:
                        return _refused(slow)
        except MemoryError:
            return _refused("compiling it takes too much memory; use a simpler one")
        except RecursionError:
            return _refused("it is nested too deep")
        except Exception as error:
            return _refused(str(error)[:500])
        kept = {name: getattr(wanted, name) for name in (*spec, "grammar")}
        chosen_name, is_automatic = chosen_backend(wanted)
        return {
            "spec": {name: value for name, value in kept.items() if value is not None},
            "backend": chosen_name,
            "automatic": is_automatic,
        }

    def _check(self, wanted: Any) -> str | None:
        """Check a grammar by vLLM's rules, and that all of a schema is enforced.

        Return why the grammar is refused; None if it passed.

        Raises:
            Exception: vLLM refuses the grammar.
        """
        from vllm.sampling_params import SamplingParams

        settings = self._config.structured_outputs_config
        found = []
        if wanted.json is not None and settings.backend in ("auto", "xgrammar"):
            schema = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
            found = unenforced(schema)
        if found and not self._combined:
            return f"xgrammar does not enforce {named(found)}; leave that out"
        if found:
            settings = copy.copy(settings)
            settings.backend = "guidance"
        try:
            SamplingParams(structured_outputs=wanted).verify(
                self._config.model_config, None, settings, self._tokenizer
            )
        except Exception as error:
            if not found or isinstance(error, MemoryError | RecursionError):
                raise
            return f"the schema has {named(found)}, which cannot be enforced ({str(error)[:300]})"
        return None


class _GrammarMatcher:
    """A `Matcher` of a grammar that vLLM compiled."""

    def __init__(self, grammar: Any, mask: Any, end: int | None) -> None:
        self._grammar, self._mask, self._end = grammar, mask, end

    def allowed(self) -> Sequence[int]:
        if self._grammar.is_terminated():
            return ()
        self._grammar.fill_bitmask(self._mask, 0)
        bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
        if self._end is not None:
            bits[self._end] = 0
        return np.flatnonzero(bits)  # type: ignore[return-value]

    def accept(self, token: int) -> bool:
        return bool(self._grammar.accept_tokens("trial", [token]))


def serve(
    compiler: Callable[[Spec], Answer], trial_limits: TrialLimits, jobs: Any, answers: Any
) -> None:
    """Try each grammar as soon as it arrives, until the input ends."""
    one_writes = threading.Lock()

    def try_one(number: int, spec: Spec) -> None:
        answer = run_confined(partial(compiler, spec), trial_limits)
        size = len(json.dumps(answer))
        line = json.dumps({**answer, "bytes": size, "id": number}).encode() + b"\n"
        with one_writes:
            answers.write(line)
            answers.flush()

    for line in jobs:
        job = json.loads(line)
        threading.Thread(target=try_one, args=(job["id"], job["spec"]), daemon=True).start()


def _child(work: Callable[[], Answer], trial_limits: TrialLimits, writer: int) -> None:
    """Do the work in the child process within its limits, and exit. Never returns."""
    try:
        _end_with_parent()
        os.nice(NICEST)
        faulthandler.disable()  # a crash is an answer here
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CPU, (trial_limits.cpu_s, trial_limits.cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_AS, (used + trial_limits.added_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        data: list[bytes] = []
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=lambda: data.append(json.dumps(work()).encode()))
        thread.start()
        thread.join()
        with open(writer, "wb") as out:
            out.write(data[0])
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _yield_to_engines(pid: int) -> None:
    """Let a process use only the processor time that other processes leave.

    Niceness is not enough: on a Ray cluster that Headrace did not start, workers, and thus the
    engines, have 15, and the maximum is 19.
    """
    with contextlib.suppress(AttributeError, OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def _cpu_s(pid: int) -> float:
    """Return the processor seconds that a child has used."""
    return time.clock_gettime(~pid << 3 | 2)  # Linux: the clock of a process, by its id


class _CpuThrottle:
    """Throttle of a child: for `FREE_S` of processor time it computes at `NICEST`, and then a
    quarter of the time and only while other processes leave a core.

    A compiler that fills memory slows engines on other cores, even at the lowest priority. All
    children that have used up their free time share that quarter. A grammar in use compiles in the
    free time: at the lowest priority, one would wait for more than `COMPILE_WALL_S` on a machine
    whose cores are all busy.

    Args:
        pid: process id of the child, which is running.
    """

    _sharing: ClassVar[set[int]] = set()

    def __init__(self, pid: int) -> None:
        self._pid, self._runs = pid, True
        self._change_s = time.monotonic() + limits.FREE_S

    def __enter__(self) -> _CpuThrottle:
        return self

    def __exit__(self, *raised: object) -> None:
        self._sharing.discard(self._pid)

    def due_s(self) -> float:
        """Stop or continue the child if that is due; return the seconds until the next call."""
        now_s = time.monotonic()
        if now_s >= self._change_s:
            if self._pid not in self._sharing:
                left_s = limits.FREE_S - _cpu_s(self._pid)
                if left_s > 0:
                    self._change_s = now_s + max(left_s, limits.RUN_S)
                    return self._change_s - now_s
                self._sharing.add(self._pid)
                _yield_to_engines(self._pid)
            self._runs = not self._runs
            os.kill(self._pid, signal.SIGCONT if self._runs else signal.SIGSTOP)
            turn_s = (limits.RUN_S + limits.REST_S) * len(self._sharing)
            self._change_s = now_s + (limits.RUN_S if self._runs else turn_s - limits.RUN_S)
        return self._change_s - now_s


def _read(reader: int, until_s: float, max_bytes: int, throttle: _CpuThrottle) -> tuple[bytes, str]:
    """Return the bytes of a pipe, and why they end: `closed`, `late` or `long`.

    Bytes are returned only if the pipe was closed in time.
    """
    data = bytearray()
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return b"", "late"
        if not select.select([reader], [], [], min(left_s, throttle.due_s()))[0]:
            continue
        part = os.read(reader, 1 << 16)
        if not part:
            return bytes(data), "closed"
        data += part
        if len(data) > max_bytes:
            return b"", "long"


def _refused(why: str) -> Answer:
    return {"refused": why}


def _unfinished(why: str) -> Answer:
    return {"unfinished": why}


def main() -> None:
    """Serve over standard input and output; all other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _end_with_parent()
    # vLLM's own limit also counts the time for which a trial rests. It must not end a trial first,
    # since vLLM's message would count as a refusal.
    os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = str(math.ceil(2 * limits.COMPILE_WALL_S))
    jobs = sys.stdin.buffer
    compiler = Compiler(pickle.loads(jobs.read(int.from_bytes(jobs.read(8)))))
    answers.write(b"ready\n")
    answers.flush()
    os.nice(NICE)  # not before: a start that waits for other processes lets grammars wait
    serve(compiler, TrialLimits(), jobs, answers)


if __name__ == "__main__":
    main()

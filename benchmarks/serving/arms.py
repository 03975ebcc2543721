"""The arms as the benchmark holds them: start, wait, account CPU time, stop without a trace.

Each is a child process (`benchmarks.serving.arm`) with a token of its own in its environment, by
which all that descends from it is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from headrace.cli import cluster
from headrace.cli.process_matcher import ProcessMatcher
from headrace.config import HeadraceConfig, load_config
from headrace.observability.shared_memory import TOKEN_VARIABLE, ProcessId, remove_shm, shm_names

MODEL_ID = "bench-model"
MAX_MODEL_LEN = 8192
READY = "READY"
STOP_GRACE_S = 90.0


class ArmError(RuntimeError):
    """An arm did not start; the text ends with its last words."""


def settings(model: str, port: int, policy: str = "cost", decodes: int = 1) -> HeadraceConfig:
    """Return the configuration that all arms take their engine settings from.

    Args:
        model: a model folder or a hub id.
        port: where the arm's endpoint listens.
        policy: of Headrace's router.
        decodes: decode replicas.
    """
    overrides = {
        "model.id": MODEL_ID,
        "model.source": model,
        "model.max_model_len": MAX_MODEL_LEN,
        "decode.replicas": decodes,
        "gateway.port": port,
        "ray.dashboard": False,
        "router.policy": policy,
    }
    return load_config(None, "laptop", [f"{k}={json.dumps(v)}" for k, v in overrides.items()])


class Arm:
    """One arm.

    Args:
        name: its name in tables.
        kind: `vllm`, `vllm_x2` (two behind HAProxy), `ray_pd` or `headrace`.
        model: a model folder or a hub id.
        policy: of Headrace's router.
        decodes: decode replicas, for the kinds that have any.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        model: str,
        policy: str = "cost",
        decodes: int = 1,
    ) -> None:
        self.name, self.kind = name, kind
        self.port = cluster.free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.started_s = 0.0
        self._model, self._policy, self._decodes = model, policy, decodes
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = cluster.make_temp_dir("bench")
        self._log = Path(tempfile.mkdtemp(prefix="headrace-bench-")) / "arm.log"
        self._matcher = ProcessMatcher(secrets.token_hex(8), self._folder)

    def start(self) -> None:
        """Start the process; returns at once."""
        command = [sys.executable, "-m", "benchmarks.serving.arm", self.kind]
        command += ["--model", self._model, "--port", str(self.port)]
        command += ["--policy", self._policy]
        command += ["--folder", str(self._folder), "--decode", str(self._decodes)]
        self._matcher.shm_before = shm_names()
        self._began = time.monotonic()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {TOKEN_VARIABLE: self._matcher.token},
                start_new_session=True,  # Ctrl-C must reach only us, who stop it in order
            )
        self._matcher.pids = [ProcessId.of(psutil.Process(self._process.pid))]

    def wait(self, timeout_s: float = 420.0) -> None:
        """Until it answers.

        Raises:
            ArmError: it ended, or did not answer in time.
        """
        while not (self._said_ready() and self._answers()):
            assert self._process is not None
            if self._process.poll() is not None:
                raise ArmError(f"{self.name} ended while starting: {self._last_words()}")
            if time.monotonic() - self._began > timeout_s:
                raise ArmError(
                    f"{self.name} was not ready in {timeout_s:g} s: {self._last_words()}"
                )
            time.sleep(0.5)
        self.started_s = time.monotonic() - self._began

    def stop(self) -> None:
        """End it and all it started, remove its folders and its files in /dev/shm. Idempotent."""
        if self._process is not None:
            self.resume()
            processes = self.processes()
            shm = self._matcher.shm_files(processes.values())
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_GRACE_S)
            self._matcher.pids = [i for i in processes if i.process() is not None]
            cluster.stop(self._matcher)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            remove_shm(shm, self._matcher.shm_before)
            self._process = None
        for folder in (self._folder, self._log.parent):
            shutil.rmtree(folder, ignore_errors=True)

    def pause(self) -> None:
        """Hold the engines' workers still while another arm is measured.

        In Ray's app NIXL's thread keeps a core busy in each worker, even when there is nothing to
        do; on a small machine an idle arm would slow the others down. Only engine processes are
        held: Ray's own must go on answering its health checks.
        """
        for process in self._engine_workers():
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def resume(self) -> None:
        """Let them go on."""
        for process in self._engine_workers():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def _engine_workers(self) -> list[psutil.Process]:
        workers, cores = [], []
        for process in self.processes().values():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if command.startswith("VLLM::Worker"):
                    workers.append(process)
                elif command.startswith("VLLM::EngineCore"):
                    cores.append(process)
        return workers or cores  # without workers of its own, an engine core does their work

    def processes(self) -> dict[ProcessId, psutil.Process]:
        """All its processes."""
        return self._matcher.processes()

    def rss_bytes(self) -> int:
        """Return the resident memory of all its processes; shared pages count in each of them."""
        total = 0
        for process in self.processes().values():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def get(self, path: str, timeout_s: float = 20.0) -> Any:
        """JSON at a path of its endpoint; None if it does not answer with any."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
                return json.load(answer)
        except (OSError, ValueError, urllib.error.URLError):
            return None

    def _said_ready(self) -> bool:
        return READY.encode() in self._log.read_bytes().split(b"\n")

    def _answers(self) -> bool:
        return self.get("/v1/models", timeout_s=5.0) is not None

    def _last_words(self) -> str:
        text = self._log.read_text("utf-8", errors="replace")
        return "\n".join(line for line in text.splitlines() if line.strip())[-2000:]


class CpuClock:
    """CPU seconds of the arms, of this process and of all other processes between two looks."""

    def __init__(self, arms: Iterable[Arm]) -> None:
        self._groups = {arm.name: arm.processes() for arm in arms}
        self._groups["client"] = {ProcessId.of(psutil.Process()): psutil.Process()}
        self._at = time.monotonic()
        self._before = {name: self._seconds(group) for name, group in self._groups.items()}
        self._busy = _machine_busy_s()

    def cores(self) -> dict[str, float]:
        """Return the cores that each arm, `client` and `outside` used since this clock was made.

        Processes that were started since count as `outside`; an arm's set is looked up only once,
        before the measurement.
        """
        wall_s = time.monotonic() - self._at
        busy_s = _machine_busy_s() - self._busy
        out = {}
        for name, group in self._groups.items():
            out[name] = max(0.0, self._seconds(group) - self._before[name]) / wall_s
        out["outside"] = max(0.0, busy_s / wall_s - sum(out.values()))
        return out

    @staticmethod
    def _seconds(group: Mapping[ProcessId, psutil.Process]) -> float:
        total = 0.0
        for process in group.values():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)

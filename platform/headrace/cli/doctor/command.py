"""The command `headrace doctor` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import probes
from headrace.cli.arguments.options import FileOption, JsonOption, PresetOption, SetOption
from headrace.cli.console import CliError, stderr, stdout
from headrace.cli.doctor import agreement, finding, link, machine, pod
from headrace.cli.doctor.finding import Check, Finding
from headrace.config import ConfigError, HeadraceConfig, load_config
from headrace_kvstore.protocol.address import split_host_port

# Only a gateway's pod holds keys and certificates, and opens an endpoint.
WITHOUT_ENDPOINT = [
    "gateway.host=127.0.0.1",
    "gateway.insecure=true",
    "gateway.api_keys_file=null",
    "gateway.tls_cert_file=null",
    "gateway.tls_key_file=null",
    "gateway.tls_client_ca_file=null",
]


def doctor(
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Check this pod of a cluster instead, before its engine starts. Holds no GPU.",
        ),
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(
            help="Role of the pod: prefill, decode, gateway or head. Default: decode. Needs "
            "--cluster.",
            autocompletion=lambda incomplete: [r for r in pod.ROLES if r.startswith(incomplete)],
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Name of the pod's model in `models`. Default: the first. Needs --cluster."
        ),
    ] = None,
    file: FileOption = None,
    preset: PresetOption = None,
    overrides: SetOption = None,
    engines: Annotated[int, typer.Option(min=1, help="Engines that this pod runs.")] = 1,
    expect_rdma: Annotated[
        bool,
        typer.Option(
            "--expect-rdma",
            envvar="HEADRACE_EXPECT_RDMA",
            help="The pod asked for RDMA: fail if it may not use it.",
        ),
    ] = False,
    clock_url: Annotated[
        str | None,
        typer.Option(help="HTTP server whose Date counts. Default: the Kubernetes API, in a pod."),
    ] = None,
    tolerate: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a check whose failure is only a warning and whose warning is fine, such "
            "as NVMe or ray-token. Can be repeated; the variable holds names between spaces.",
            envvar="HEADRACE_DOCTOR_TOLERATE",
        ),
    ] = None,
    listen: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Let another machine measure the link to this one, at this port."
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a machine that listens: measure the link to it, and compare."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="How long to listen (default: 600), or to measure each kind of transfer with "
            "--peer (default: 2, at most 10).",
        ),
    ] = None,
    as_json: JsonOption = False,
    termination_log: Annotated[
        Path,
        typer.Option(help="File for the problems, for the pod's status, if it exists."),
    ] = Path("/dev/termination-log"),
) -> None:
    """Check this machine, or with --cluster this pod, and print a remedy for each problem.

    The exit status is 1 if something must be repaired first.
    """
    if not cluster:
        pod_only = {"--role": role, "--peer": peer, "--listen": listen, "--seconds": seconds}
        for name, value in {**pod_only, "--clock-url": clock_url, "--model": model}.items():
            if value is not None:
                raise CliError(f"{name} needs --cluster", 2)
        raise typer.Exit(check_machine(load_config(file, preset, overrides or ()), as_json=as_json))
    role = role or "decode"
    if role not in pod.ROLES:
        raise CliError(f'--role: must be prefill, decode, gateway or head, got "{role}"', 2)
    if peer is not None and not _is_address(peer):
        raise CliError(f'--peer: must be like "10.0.0.1:7777", got "{peer}"', 2)
    extra = list(overrides or [])
    try:
        config = load_config(file, preset, extra + (WITHOUT_ENDPOINT if role != "gateway" else []))
    except ConfigError as error:
        findings = [_wrong(problem) for problem in error.problems]
        raise typer.Exit(_tell(findings, as_json, termination_log)) from None
    models = config.served_models()
    if model is not None and model not in models:
        raise CliError(f'--model: must be one of {", ".join(models)}, got "{model}"', 2)
    config = models[model or next(iter(models))]
    this = pod.Pod(role, config, engines, expect_rdma, clock_url)  # type: ignore[arg-type]
    if listen is not None:
        from headrace.cli.probes import transfer

        transfer.become_listener(listen, _facts(this), seconds or 600.0)
    checks = pod.checks(this)
    if peer is not None:
        checks = [("link", lambda: _measure(this, peer, seconds or 2.0))]
    findings = [_tolerated(f, tolerate or []) for f in finding.run(checks)]
    raise typer.Exit(_tell(findings, as_json, termination_log))


def check_machine(config: HeadraceConfig, *, as_json: bool) -> int:
    """Check the machine for `headrace up`. Return the exit status, 1 if a finding is FAIL."""
    console = stderr()

    def before(name: str) -> None:
        if not as_json and console.is_terminal:
            console.print(f"checking {name} ...", style="dim", end="\r")

    checks: list[Check] = machine.checks(config)
    findings = finding.run(checks, before)
    if as_json:
        print(finding.as_json(findings))
    else:
        stdout().print(finding.as_table(findings))
        stdout().print(finding.verdict(findings))
    return 1 if finding.failed(findings) else 0


def _is_address(text: str) -> bool:
    try:
        return split_host_port(text)[1] > 0
    except ValueError:
        return False


def _wrong(problem: str) -> Finding:
    field = problem.partition(":")[0]
    remedy = f"correct {field} in the chart's values (`headrace config check` finds it beforehand)"
    return Finding("configuration", "FAIL", problem, remedy)


def _tolerated(found: Finding, names: list[str]) -> Finding:
    plain = {name.lower().replace(" ", "-") for name in names}
    if found.level == "OK" or found.what.lower().replace(" ", "-") not in plain:
        return found
    level: finding.Level = "WARN" if found.level == "FAIL" else "OK"
    return Finding(found.what, level, f"{found.found} (tolerated)", found.remedy)


def _tell(findings: list[Finding], as_json: bool, termination_log: Path) -> int:
    finding.leave_message(findings, termination_log)
    print(finding.as_json(findings) if as_json else finding.as_lines(findings), flush=True)
    return 1 if finding.failed(findings) else 0


def _facts(this: pod.Pod) -> dict[str, object]:
    env = {"PYTHONHASHSEED": agreement.DEFAULT_SEED} | (this.engine.env if this.engine else {})
    return probes.describe(env, this.model_folder)


def _measure(this: pod.Pod, peer: str, seconds: float) -> list[Finding]:
    from headrace.cli.probes import transfer

    done, error = transfer.measure(peer, seconds)
    if done is None:
        return [link.unreachable(peer, error)]
    rdma = bool(probes.rdma_nodes())
    found = link.link(done, peer, rdma, this.shape[1])
    return found + agreement.peer(_facts(this), done.facts)

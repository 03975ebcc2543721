"""Judges what engines run without: engines of running apps, and engines that a start would make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.cli.doctor.finding import Finding
from headrace.config import HeadraceConfig, RoleSettings
from headrace_engine.serving.model_limits import PREFIX_CACHE, SPECULATION, STORE, expected_left_out

SWITCHES = {
    "store": "store.enabled: false",
    "speculation": "speculation.enabled: false",
    "blending": "techniques.blending.mode: off",
    "sparse": "techniques.sparse.mode: off",
    "compression": "techniques.compression.mode: off",
    "offload": "techniques.sparse.offload_gib: 0",
    "prefix_cache": "engine.enable_prefix_caching: false",
}
"""By part, the setting that leaves it out on purpose."""


def running(apps: Mapping[str, Iterable[Mapping[str, Any]] | None]) -> list[Finding]:
    """Judge running apps.

    Args:
        apps: by name of the instance, the status of each of its replicas; None if the app does not
            answer.
    """
    findings = []
    for name, replicas in apps.items():
        if replicas is None:
            remedy = f"headrace status --name {name}"
            findings.append(Finding("left out", "WARN", f'"{name}" does not answer', remedy))
            continue
        replicas = list(replicas)
        several = len({replica.get("model") for replica in replicas}) > 1
        found: dict[tuple[str, str, str], list[str]] = {}
        for replica in replicas:
            model = f"{replica.get('model')}, " if several else ""
            for part, why in (replica.get("left_out") or {}).items():
                roles = found.setdefault((model, part, why), [])
                roles.append(str(replica.get("role", "replica")))
        for (model, part, why), roles in found.items():
            where = f'"{name}", {model}{" and ".join(sorted({*roles}))}'
            findings.append(_finding(part, why, where))
    return findings or [Finding("left out", "OK", "no part, of the running apps")] * bool(apps)


def expected(
    config: HeadraceConfig,
    roles: Iterable[RoleSettings],
    model: Mapping[str, Any] | None,
    key: str = "",
) -> list[Finding]:
    """Judge what a model's engines would run without, as far as the model's files decide it.

    Args:
        config: the model's configuration.
        roles: of the engines.
        model: the model's parsed config.json; None if it is not here.
        key: the model's name in `models`; empty if it is the only one.
    """
    if model is None:
        return []
    found: dict[str, str] = {}
    for role in roles:
        found |= {
            part: why
            for part, why in expected_left_out(model, on_cpu=role.gpus == 0).items()
            if _is_wanted(part, config, role)
        }
    where = f"models.{key}" if key else "the model of this configuration"
    return [_finding(part, why, where) for part, why in found.items()]


def _is_wanted(part: str, config: HeadraceConfig, role: RoleSettings) -> bool:
    wanted = {
        STORE: config.store.enabled,
        SPECULATION: config.speculation.enabled and "speculative_config" not in role.engine,
        PREFIX_CACHE: role.engine.get("enable_prefix_caching") is not False,
    }
    return wanted[part]


def _finding(part: str, why: str, where: str) -> Finding:
    remedy = "requests are served without it; docs/models.md has the models that have it"
    if part in SWITCHES:
        remedy = f"requests are served without it; {SWITCHES[part]} says that this is wanted"
    return Finding("left out", "WARN", f"{part.replace('_', ' ')} ({where}): {why}", remedy)

"""Judges whether prefill and decode can read each other's KV: seeds, parallelism, environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.cli.doctor.finding import Finding, Level
from headrace.config import HeadraceConfig

DEFAULT_SEED = "0"
# Differences here make KV unreadable, or hashes unequal.
BINDING = ("VLLM_KV_CACHE_LAYOUT", "VLLM_ATTENTION_BACKEND", "VLLM_USE_", "VLLM_MLA_")
PREFIXES = ("VLLM_", "UCX_", "NIXL_")


def hash_seed(config: HeadraceConfig) -> Finding:
    """Check that PYTHONHASHSEED is one number in both roles: block hashes start from it."""
    prefill, decode = (
        role.env.get("PYTHONHASHSEED", DEFAULT_SEED) for role in config.roles().values()
    )
    found = f"PYTHONHASHSEED is {prefill} in prefill, {decode} in decode"
    if prefill != decode:
        return Finding(
            "hash seed",
            "FAIL",
            f"{found}: equal prompts would get unequal block hashes, so no KV is found again",
            "remove PYTHONHASHSEED from prefill.env and decode.env, or set one number in both",
        )
    if not prefill.isdigit() or int(prefill) >= 2**32:
        return Finding(
            "hash seed",
            "FAIL",
            f'PYTHONHASHSEED is "{prefill}"',
            "remove it from prefill.env and decode.env, or set a whole number below 2^32 in both",
        )
    return Finding("hash seed", "OK", f"{prefill} in both roles")


def parallel(config: HeadraceConfig, kv_heads: int | None) -> Finding:
    """Check that the roles' tensor parallel sizes allow decode to pull from prefill.

    The rules are those of vLLM's NixlConnector (0.32): one tensor parallel size divides the other;
    more ranks in prefill than in decode only while each rank has KV heads of its own.

    Args:
        kv_heads: KV heads of the model; None if they are not known here.
    """
    p_tp, d_tp = config.prefill.world_size, config.decode.world_size
    found = f"TP {p_tp} in prefill, {d_tp} in decode"
    if max(p_tp, d_tp) % min(p_tp, d_tp):
        return Finding(
            "parallelism",
            "FAIL",
            f"{found}: neither divides the other",
            "set engine.tensor_parallel_size so that one is a multiple of the other, such as "
            f"{min(p_tp, d_tp)} and {2 * min(p_tp, d_tp)}",
        )
    if kv_heads is not None and p_tp > d_tp and p_tp > kv_heads:
        return Finding(
            "parallelism",
            "FAIL",
            f"{found}, but the model has {kv_heads} KV heads: prefill's ranks would hold copies",
            f"set prefill.engine.tensor_parallel_size to at most {kv_heads}, or as in decode",
        )
    return Finding("parallelism", "OK", found)


def environment(config: HeadraceConfig) -> list[Finding]:
    """Check that vLLM's, UCX's and NIXL's variables are equal in both roles."""
    prefill, decode = config.prefill.env, config.decode.env
    names = sorted(
        n for n in prefill.keys() | decode.keys()
        if n.startswith(PREFIXES) and prefill.get(n) != decode.get(n)
    )  # fmt: skip
    if not names:
        return [Finding("environment", "OK", "equal in both roles")]
    findings = []
    for name in names:
        found = (
            f"{name} is {_show(prefill.get(name))} in prefill, {_show(decode.get(name))} in decode"
        )
        findings.append(
            Finding(
                "environment",
                "FAIL" if name.startswith(BINDING) else "WARN",
                found,
                f"set {name} to one value in prefill.env and decode.env, or remove it from both",
            )
        )
    return findings


def peer(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Finding]:
    """Check that two machines' facts (`probes.describe`) agree."""
    findings = []
    mine, other = _mapping(ours, "versions"), _mapping(theirs, "versions")
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name) != other.get(name):
            findings.append(
                Finding(
                    "peer",
                    "FAIL",
                    f"{name} is {_show(mine.get(name))} here, {_show(other.get(name))} at the peer",
                    "use one image for both roles (values `image`), by digest rather than by tag",
                )
            )
    mine, other = _mapping(ours, "env"), _mapping(theirs, "env")
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name) != other.get(name):
            level: Level = (
                "FAIL" if name.startswith(BINDING) or name == "PYTHONHASHSEED" else "WARN"
            )
            remedy = f"set {name} to one value in both roles' pods, or remove it"
            findings.append(Finding("peer", level, f"{_show(name)} differs", remedy))
    if ours.get("model") and theirs.get("model") and ours["model"] != theirs["model"]:
        remedy = "fill both volumes from one revision of the model (model revision, warm-up job)"
        findings.append(Finding("peer", "FAIL", "the model's files differ", remedy))
    if ours.get("driver") != theirs.get("driver"):
        found = (
            f"driver {_show(ours.get('driver'))} here, {_show(theirs.get('driver'))} at the peer"
        )
        findings.append(Finding("peer", "WARN", found, "run one driver on all GPU nodes"))
    return findings or [Finding("peer", "OK", "versions, environment and model agree")]


def _mapping(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _show(value: Any) -> str:
    return "not set" if value is None else f'"{str(value)[:100]}"'

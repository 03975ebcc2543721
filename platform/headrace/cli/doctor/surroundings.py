"""Judges a pod's user, limits, ports, clock and Ray token."""

from __future__ import annotations

from headrace.cli import probes
from headrace.cli.doctor.finding import Finding

ENOUGH_OPEN_FILES = 16384
GOOD_OPEN_FILES = 65536
MIN_OPEN_FILES = 4096
ENOUGH_THREADS = 4096
# Ray starts about one process a core, vLLM and UCX tens of threads an engine.
MIN_THREADS = 1024
SKEW_WARN_S = 2.0
SKEW_FAIL_S = 300.0  # from here on object stores refuse signatures


def user(who: probes.User) -> Finding:
    """Check that the user has a name and is not root."""
    if who.name is None:
        return Finding(
            "user",
            "FAIL",
            f"uid {who.uid} has no name; libraries that ask for it end with KeyError",
            "set the environment variable USER (any name), or run as the image's uid 1000",
        )
    if who.uid == 0:
        remedy = "set securityContext.runAsNonRoot: true and runAsUser: 1000"
        return Finding("user", "WARN", "root", remedy)
    return Finding("user", "OK", f"{who.name} ({who.uid})")


def open_files(soft: int, hard: int) -> Finding:
    """Check for enough file descriptors: each stream takes two, each Ray worker hundreds.

    KubeRay raises the soft limit to `GOOD_OPEN_FILES` where the hard one lets it.
    """
    if soft >= ENOUGH_OPEN_FILES or hard >= GOOD_OPEN_FILES:
        return Finding("open files", "OK", f"limit {soft} (hard {hard})")
    return Finding(
        "open files",
        "FAIL" if hard < MIN_OPEN_FILES else "WARN",
        f"limit {soft} (hard {hard})",
        "raise LimitNOFILE of the node's container runtime (systemd unit of containerd) to "
        f"{GOOD_OPEN_FILES} or more; a pod cannot raise it itself",
    )


def threads(limit: int | None) -> Finding:
    """Check for enough processes and threads."""
    if limit is None or limit >= ENOUGH_THREADS:
        return Finding("threads", "OK", f"limit {limit or 'none'}")
    return Finding(
        "threads",
        "FAIL" if limit < MIN_THREADS else "WARN",
        f"limit {limit}",
        f"raise the kubelet's podPidsLimit to {ENOUGH_THREADS} or more",
    )


def ports(taken: list[int], wanted: list[int]) -> Finding:
    """Check that the ports on which this role listens are free."""
    if taken:
        words = ", ".join(str(p) for p in taken)
        return Finding(
            "ports",
            "FAIL",
            f"{words} in use",
            "with hostNetwork, another program of the node has it: remove hostNetwork "
            "(in the chart: podTemplate.spec), or choose nodes without that program",
        )
    return Finding("ports", "OK", f"{', '.join(str(p) for p in wanted)} free")


def clock(skew_s: float, source: str) -> Finding:
    """Check that the clock agrees with another machine's."""
    found = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} {source}"
    if abs(skew_s) < SKEW_WARN_S:
        return Finding("clock", "OK", found)
    return Finding(
        "clock",
        "FAIL" if abs(skew_s) > SKEW_FAIL_S else "WARN",
        found,
        "let the node's time service (chrony, systemd-timesyncd) synchronise; a skewed clock makes "
        "object stores refuse signatures and traces lie",
    )


def ray_token(mode: str, error: str) -> Finding:
    """Check that Ray asks for a token, and that there is one."""
    if mode != "token":
        return Finding(
            "Ray token",
            "WARN",
            f"RAY_AUTH_MODE is {mode}: whoever reaches Ray's ports can run code",
            "set rayClusterConfig.authOptions.mode: token (values `rayToken.enabled`)",
        )
    if error:
        return Finding(
            "Ray token",
            "FAIL",
            f"RAY_AUTH_MODE is token, but there is none: {error}",
            "make the Secret with a key `auth_token` that values `rayToken.existingSecret` names, "
            "and pass it to this container as RAY_AUTH_TOKEN",
        )
    return Finding("Ray token", "OK", "present")

"""Judges the measurements against another machine."""

from __future__ import annotations

from headrace.cli.doctor.finding import Finding
from headrace.cli.probes.transfer import Transfer

SLOW_GBPS = 0.1
# With RDMA, NIXL must beat one plain TCP stream clearly; else KV takes the TCP path.
RDMA_GAIN = 1.5
SKEW_WARN_S = 1.0


def link(done: Transfer, peer: str, rdma: bool, kv_bytes_per_token: int | None) -> list[Finding]:
    """Check the speed and the path of KV from a peer, and whether the clocks agree.

    Args:
        rdma: whether this container may use RDMA.
    """
    if done.nixl_gbps is None:
        return [
            Finding(
                "link",
                "FAIL",
                f"NIXL cannot read from {peer}: {done.nixl_error}; "
                f"plain TCP {done.tcp_gbps:.2f} GB/s",
                "let engines reach each other on all ports (NetworkPolicy), and check UCX_TLS and "
                "UCX_NET_DEVICES: they must name devices that both nodes have",
            ),
            _clock(done, peer),
        ]
    found = f"{done.nixl_gbps:.2f} GB/s through NIXL from {peer}, {done.tcp_gbps:.2f} by plain TCP"
    if kv_bytes_per_token:
        ms = kv_bytes_per_token * 1000 / (done.nixl_gbps * 1e9) * 1e3
        found += f"; 1,000 tokens' KV take {ms:.1f} ms"
    if rdma and done.nixl_gbps < RDMA_GAIN * done.tcp_gbps:
        finding = Finding(
            "link",
            "WARN",
            f"{found}: RDMA seems unused",
            "remove UCX_TLS (or add rc, cuda), check UCX_NET_DEVICES and the network attachment of "
            "the pods; `UCX_LOG_LEVEL=info` shows the path chosen",
        )
    elif done.nixl_gbps < SLOW_GBPS:
        finding = Finding(
            "link",
            "WARN",
            found,
            "prefer one network for both roles (values "
            "`decode.podTemplate`: topologySpreadConstraints or affinity, node pools in one zone); "
            "the router prices slow links and prefills locally",
        )
    else:
        finding = Finding("link", "OK", found)
    return [finding, _clock(done, peer)]


def unreachable(peer: str, error: str) -> Finding:
    """Report that there is no measurement."""
    return Finding(
        "link",
        "FAIL",
        f"{peer}: {error}",
        "start `headrace doctor --cluster --listen PORT` in a pod there, and let this pod reach it "
        "(NetworkPolicy)",
    )


def _clock(done: Transfer, peer: str) -> Finding:
    found = f"{done.clock_s * 1e3:+.0f} ms against {peer} (to {done.clock_error_s * 1e3:.0f} ms)"
    if abs(done.clock_s) - done.clock_error_s < SKEW_WARN_S:
        return Finding("clock", "OK", found)
    remedy = "let the nodes' time service (chrony, systemd-timesyncd) synchronise"
    return Finding("clock", "WARN", found, remedy)

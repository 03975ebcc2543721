"""Network policies of a release: who reaches what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tests.support.chart_objects import (
    Object,
    cluster_of,
    groups,
    matches,
    of_kind,
    role_of,
)

ELSEWHERE = {"kubernetes.io/metadata.name": "elsewhere"}
OWN = {"kubernetes.io/metadata.name": "own"}


def allowed(
    policies: list[Object],
    direction: str,
    pod: Mapping[str, str],
    peer: Mapping[str, str],
    namespace: Mapping[str, str],
    port: int | str,
    protocol: str = "TCP",
) -> bool:
    """Whether the policies let a pod of the release take (`Ingress`) or open (`Egress`) a
    connection.

    Args:
        pod: labels of the release's pod.
        peer: labels of the other pod; empty for an address outside of the cluster.
        namespace: labels of the peer's namespace; empty for such an address.
        port: number or name of the destination's port.
    """
    mine = [
        one["spec"]
        for one in policies
        if matches(one["spec"]["podSelector"], pod) and direction in one["spec"]["policyTypes"]
    ]
    side = "from" if direction == "Ingress" else "to"
    return not mine or any(
        _peer_matches(rule.get(side) or [], peer, namespace)
        and _port_matches(rule.get("ports") or [], port, protocol)
        for spec in mine
        for rule in spec.get(direction.lower()) or []
    )


def _peer_matches(
    peers: list[Object], labels: Mapping[str, str], namespace: Mapping[str, str]
) -> bool:
    def one(peer: Object) -> bool:
        if "ipBlock" in peer:
            return not namespace
        where = peer.get("namespaceSelector")
        right = namespace == OWN if where is None else bool(namespace) and matches(where, namespace)
        return right and matches(peer.get("podSelector"), labels)

    return not peers or any(map(one, peers))


def _port_matches(ports: list[Object], port: int | str, protocol: str) -> bool:
    return not ports or any(
        each.get("protocol", "TCP") == protocol and each.get("port", port) == port for each in ports
    )


def unreachable(objects: list[Object]) -> Iterator[str]:
    """Connections that the release needs and its policies forbid, or that they should forbid."""
    policies = of_kind(objects, "NetworkPolicy")
    if not policies:
        return
    groups_now = groups(objects)
    labels = {name: one["template"]["metadata"]["labels"] for name, one in groups_now.items()}
    ports = {
        name: {
            each.get("name"): each["containerPort"]
            for each in one["template"]["spec"]["containers"][0]["ports"]
        }
        for name, one in groups_now.items()
    }
    for source in labels:
        for destination in labels:
            # Ray's, NIXL's and the store's ports are any.
            for port in (*ports[destination].values(), 33333):
                for direction, pod, peer in (
                    ("Egress", labels[source], labels[destination]),
                    ("Ingress", labels[destination], labels[source]),
                ):
                    if not allowed(policies, direction, pod, peer, OWN, port):
                        yield f"{source} does not reach port {port} of {destination}"
    for name, opened in ports.items():
        for known, port in opened.items():
            open_to_all = allowed(policies, "Ingress", labels[name], {}, ELSEWHERE, port)
            if open_to_all and (role_of(groups_now[name]), known) != ("gateway", "http"):
                yield f"everyone reaches port {port} of {name}"
        # DNS, in the cluster and behind its Service on OpenShift; hubs.
        wanted = [("UDP", 53), ("UDP", 5353), ("TCP", 443)]
        wanted += [("TCP", port) for port in _ports_of_addresses(groups_now[name])]
        if name == "head":
            wanted += [("TCP", port) for port in _ports_of_redis(objects)]
            if cluster_of(objects).get("enableInTreeAutoscaling"):
                wanted += [("TCP", 6443)]
        for protocol, port in wanted:
            if not allowed(policies, "Egress", labels[name], {}, {}, port, protocol):
                yield f"{name} does not reach {protocol} port {port}"
    operators = {
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for policy in policies
        for rule in policy["spec"].get("ingress", [])
        for peer in rule.get("from", [])
        if "namespaceSelector" in peer and {"port": 8265, "protocol": "TCP"} in rule["ports"]
    }
    if not operators:
        yield "KubeRay's operator reaches no dashboard"


ADDRESS = re.compile(
    r"(?P<scheme>[a-z+]+)://(?:[^/?#@]*@)?(?:\[[^]]*\]|[^/?#:]+)(?::(?P<port>[0-9]+))?"
)


def _port_of(address: str) -> int | None:
    found = ADDRESS.match(address)
    if found is None:
        return None
    known = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}
    return int(found["port"]) if found["port"] else known.get(found["scheme"])


def _ports_of_addresses(group: Object) -> list[int]:
    env = group["template"]["spec"]["containers"][0].get("env", [])
    found = [_port_of(str(each.get("value", ""))) for each in env]
    return [port for port in found if port is not None]


def _ports_of_redis(objects: list[Object]) -> list[int]:
    address = cluster_of(objects).get("gcsFaultToleranceOptions", {}).get("redisAddress", "")
    parts = [part if "://" in part else f"redis://{part}" for part in address.split(",") if part]
    return [port for part in parts if (port := _port_of(part)) is not None]

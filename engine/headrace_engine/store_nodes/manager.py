"""Manager of one StoreNode on each machine that runs engines, for as long as the app runs.

The manager is a Serve deployment. Each engine replica reports where it runs (`join`). On each such
machine the manager has a named, detached Ray actor, which Ray restarts when it dies. The actor
outlives the manager, and the next manager finds it by name. When the app is deleted, the manager
ends all actors and thereby removes the arenas. Engines never wait for any of this; without a node
they work without its tiers. The manager also connects the nodes to each other (`peer_discovery`),
so that machines read each other's blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace_engine.store_nodes.peer_discovery import PeerDiscovery
from headrace_kvstore.node.administration import parse_hex
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.protocol.address import host_port, split_host_port
from headrace_kvstore.settings.node_settings import NodeSettings

logger = logging.getLogger("headrace.kvstore")

NAMESPACE = "headrace"
CHECK_INTERVAL_S = 5.0
"""Time between checks that every machine has its node; Ray itself restarts a node that dies."""
ANSWER_S = 3.0
CLEAR_S = 30.0
"""Maximum wait for an operator's request: clearing a disk takes a while."""
JOIN_RETRY_S = 2.0
SECRET_TRIES = 5
ANYWHERE = ("0.0.0.0", "::")

Setup = Callable[[str], None]
Observe = Callable[[dict[str, dict[str, Any] | None]], None]
"""Called with each machine's `Operations.stats`, None for a node that does not answer."""


class StoreNodeActor:
    """A StoreNode as a Ray actor; `settings` as `NodeSettings.parse` reads them."""

    def __init__(self, settings: dict[str, Any], setup: Setup | None = None) -> None:
        if setup is not None:
            setup("store-node")
        self._node = StoreNode(NodeSettings.parse(settings)).start()

    def stats(self) -> dict[str, Any]:
        """Return `Operations.stats`."""
        return self._node.operations.stats()

    def secret(self) -> str | None:
        """Return the secret by which the app's nodes know each other."""
        return self._node.settings.secret

    def serve_peers(self) -> str:
        """Lease blocks as `StoreNode.serve_peers`, at an address that other machines reach; return
        it."""
        host = ray.util.get_node_ip_address()
        bound, port = split_host_port(self._node.serve_peers(host_port(host, 0)))
        return host_port(host if bound in ANYWHERE else bound, port)

    def set_peers(self, addresses: list[str]) -> None:
        """Pull from these peers; see `StoreNode.set_peers`."""
        self._node.set_peers(addresses)

    def administer(self, action: str, namespace: str | None, hash: str | None) -> dict[str, Any]:
        """Carry out an operator's request, as `administration.administer`, with hex for bytes. The
        answer to a wrong request has `error`."""
        try:
            given = parse_hex(namespace, 16), parse_hex(hash, 32)
            return self._node.operations.administer(action, *given)
        except ValueError as error:
            return {"error": str(error)}

    def close(self) -> bool:
        """Close the node at the end of the app and its engines. Returns as `StoreNode.close`."""
        return self._node.close(engines_end=True)


class StoreNodeManager:
    """Serve deployment of the manager.

    Args:
        settings: of every machine's node.
        setup: prepares each process (logs, traces).
        share: whether machines read each other's blocks.
        observe: makes, in the manager's process, the observer that gets the nodes' statistics after
            each check.

    Raises:
        SettingsError: they are unknown or impossible.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: dict[str, Any],
        setup: Setup | None = None,
        share: bool = False,
        observe: Callable[[], Observe] | None = None,
    ) -> None:
        if setup is not None:
            setup("store")
        self._peer_discovery = PeerDiscovery(self._ask) if share else None
        self._name = NodeSettings.parse(settings).name
        self.settings, self._setup = settings, setup
        self._observe = None if observe is None else observe()
        self.failures: Counter[str] = Counter()
        self.nodes: dict[str, Any] = {}
        self.down_reasons: dict[str, str] = {}
        for machine in self._machines_with_nodes():
            self.nodes[machine] = self.start_node(machine)
        await self.agree_on_secret()
        self._task = asyncio.create_task(self.check_loop())

    async def join(self, machine: str) -> None:
        """Keep a node on this machine (Ray's node id in hex) from now on."""
        if machine not in self.nodes:
            logger.info("a store node for machine %s", machine)
            self.nodes[machine] = self.start_node(machine)

    async def status(self) -> list[dict[str, Any]]:
        """Return JSON-able: each machine's node, or why it has none, and the manager's failed
        calls."""
        nodes = dict(self.nodes)
        answers = await asyncio.gather(*(self._ask(node, "stats") for node in nodes.values()))
        return [
            {
                "machine": machine,
                **(stats or {"name": self._name, "down": self.down_reasons.get(machine)}),
                "manager_failures": dict(self.failures),
            }
            for machine, stats in zip(nodes, answers, strict=True)
        ]

    async def administer(
        self, action: str, namespace: str | None = None, hash: str | None = None
    ) -> list[dict[str, Any]]:
        """Have each machine's node carry out an operator's request; return the answers by
        machine."""
        nodes = dict(self.nodes)
        request = "administer", action, namespace, hash
        asked = (self._ask(node, *request, limit_s=CLEAR_S) for node in nodes.values())
        answers = await asyncio.gather(*asked)
        return [
            {"machine": machine, **(answer or {"error": "the store node does not answer"})}
            for machine, answer in zip(nodes, answers, strict=True)
        ]

    async def __del__(self) -> None:
        self._task.cancel()
        for node in self.nodes.values():
            await self._ask(node, "close")
            with contextlib.suppress(Exception):
                ray.kill(node)

    async def agree_on_secret(self) -> None:
        """Give all nodes one secret: that of the nodes that an earlier manager left, if there are
        any."""
        secret = self.settings.get("secret")
        for _ in range(SECRET_TRIES if self.nodes and secret is None else 0):
            known = await asyncio.gather(*(self._ask(n, "secret") for n in self.nodes.values()))
            secret = next((each for each in known if each), None)
            if secret is not None:
                break
            await asyncio.sleep(JOIN_RETRY_S)
        self.settings = {**self.settings, "secret": secret or secrets.token_hex(32)}

    def start_node(self, machine: str) -> Any:
        return (
            ray.remote(StoreNodeActor)
            .options(
                name=self._actor_name(machine),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False),
            )
            .remote(self.settings, self._setup)
        )

    def _actor_name(self, machine: str) -> str:
        return f"{self._name}/{machine}"

    def _machines_with_nodes(self) -> list[str]:
        """Return the machines where an earlier manager left nodes."""
        prefix = self._actor_name("")
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    async def _ask(self, node: Any, method: str, *arguments: Any, limit_s: float = ANSWER_S) -> Any:
        """Return a node's answer; None if it gives none in time. The first failure of each kind is
        logged, and all are counted."""
        try:
            return await asyncio.wait_for(getattr(node, method).remote(*arguments), limit_s)
        except Exception as error:
            kind = f"{method}_{type(error).__name__}"
            self.failures[kind] += 1
            if self.failures[kind] == 1:
                logger.warning("a store node's %s failed: %s", method, _first_line(error))
            return None

    async def check_loop(self) -> None:
        """Check the nodes every `CHECK_INTERVAL_S`."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self._check_nodes()
            except Exception:
                logger.exception("checking the store nodes failed")

    async def _check_nodes(self) -> None:
        """Drop machines that left the cluster, restart dead nodes, connect nodes to each other."""
        with contextlib.suppress(Exception):
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            for machine in self.nodes.keys() - alive:
                del self.nodes[machine]
        stats_by_machine: dict[str, dict[str, Any] | None] = dict.fromkeys(self.nodes)
        for machine, node in list(self.nodes.items()):
            try:
                stats_by_machine[machine] = await asyncio.wait_for(node.stats.remote(), ANSWER_S)
                self.down_reasons.pop(machine, None)
            except ray.exceptions.ActorUnavailableError as error:
                self.down_reasons[machine] = f"restarting: {_first_line(error)}"
            except ray.exceptions.RayActorError as error:
                if self.down_reasons.get(machine) != _first_line(error):
                    logger.error("no store node on %s: %s", machine, error)
                self.down_reasons[machine] = _first_line(error)
                self.nodes[machine] = self.start_node(machine)
            except Exception as error:
                self.down_reasons[machine] = f"does not answer: {_first_line(error)}"
        if self._observe is not None:
            try:
                self._observe(stats_by_machine)
            except Exception:  # the nodes matter more
                logger.exception("the store nodes' statistics are not observed any more")
                self._observe = None
        if self._peer_discovery is not None:
            await self._peer_discovery.update(dict(self.nodes))


async def join_store(manager: DeploymentHandle) -> None:
    """Report this process's machine to the manager; retries until it answers."""
    machine = ray.get_runtime_context().get_node_id()
    while True:
        try:
            await manager.join.remote(machine)
            return
        except Exception as error:
            logger.debug("the store node manager does not answer: %r", error)
            await asyncio.sleep(JOIN_RETRY_S)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]

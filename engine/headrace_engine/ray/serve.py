"""The uses of Ray beyond its public API in replicas. An upgrade of Ray breaks this file first.

`tests/unit/test_contracts_serving.py` pins what is used here.
"""

from __future__ import annotations

import os
from pathlib import Path

from ray import serve
from ray._private import worker
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_put,
)
from ray.serve._private.common import RUNNING_REQUESTS_KEY

NAMESPACE = b"headrace"
DASHBOARD_NAMESPACE, DASHBOARD_KEY = b"dashboard", "webui:url"
"""Where the head of a cluster leaves the address of its dashboard."""


def ongoing_requests(count: int) -> dict[str, float]:
    """Return an answer of `record_autoscaling_stats` with this many ongoing requests.

    It replaces Serve's own count, which lacks requests that reach a replica by another way than
    Serve. So every autoscaling policy gets the true count in `total_num_requests`.
    """
    return {RUNNING_REQUESTS_KEY: count}


def max_ongoing_requests() -> int:
    """Return this deployment's limit for each replica, as configured now."""
    return int(serve.get_replica_context()._deployment_config.max_ongoing_requests)


def shutdown_seconds() -> tuple[float, float]:
    """Return the seconds from the order to stop until Serve kills this replica, and the maximum
    part of them in which Serve finds that the replica has no calls, as configured now."""
    config = serve.get_replica_context()._deployment_config
    return config.graceful_shutdown_timeout_s, config.graceful_shutdown_wait_loop_s


def dashboard_address() -> str:
    """Return the address of the cluster's Ray dashboard: `host:port`, or the URL in
    RAY_OVERRIDE_DASHBOARD_URL. It is empty without a dashboard. Blocks.

    A worker's own `ray.init().dashboard_url` has Ray's default port, whichever the head uses.
    """
    told = os.environ.get("RAY_OVERRIDE_DASHBOARD_URL")
    if told:
        return told
    found: bytes | None = _internal_kv_get(DASHBOARD_KEY, namespace=DASHBOARD_NAMESPACE)
    return "" if found is None else found.decode()


def read_cluster_value(key: str) -> bytes | None:
    """Read a value that a process of the cluster wrote. It lives as long as the cluster. Blocks."""
    value: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return value


def write_cluster_value(key: str, value: bytes) -> None:
    """Write a value for every process of the cluster, in place of the last one. Blocks."""
    _internal_kv_put(key, value, namespace=NAMESPACE)


def add_cluster_value(key: str, value: bytes) -> bytes:
    """Write a value unless the key has one; return the key's value. Blocks."""
    _internal_kv_put(key, value, overwrite=False, namespace=NAMESPACE)
    return read_cluster_value(key) or value


def session_folder() -> Path:
    """Return the folder of the Ray session on this machine; it ends with the cluster."""
    node = worker._global_node
    assert node is not None
    return Path(node.get_session_dir_path())


def remove_cluster_values(prefix: str) -> None:
    """Remove the values whose keys begin with `prefix`. Blocks."""
    _internal_kv_del(prefix, del_by_prefix=True, namespace=NAMESPACE)

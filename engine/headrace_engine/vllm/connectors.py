"""vLLM's own KV connectors, for connectors that extend them.

`tests/unit/test_pull_proof_connectors.py` and `test_own_nixl.py` pin what is used here.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

__all__ = [
    "KVConnectorFactory",
    "KVConnectorMetadata",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "MultiConnector",
    "NixlBaseConnector",
    "NixlConnector",
    "NixlHandshakePayload",
    "NixlKVConnectorStats",
    "NixlPromMetrics",
    "NixlPullConnectorScheduler",
    "NixlPullConnectorWorker",
    "yield_req_data",
]

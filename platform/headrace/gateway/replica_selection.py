"""The choice of a replica by load and, if loads are equal, by the prompt's prefix.

    load(r) = requests of this gateway in flight to r + requests of others that r has

The second part is the number of requests that r reported, less this gateway's own at the time of
the report. Several gateways therefore see each other's load, and a gateway counts its own requests
at once.

The replica with the lowest load is chosen. Ties go to the replica with the highest rendezvous
weight for the request's affinity key: a conversation stays where its prefix is cached, and losing
one replica moves only the conversations that it held.
Prefill fallbacks are chosen only when no decode replica is ready.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.gateway.backend import ReplicaInfo

AFFINITY_CHARS = 1024
_PROMPT_FIELDS = ("system", "instructions", "messages", "input", "prompt")
"""Fields of prompts, in the order in which they are rendered; each API has one or two of them."""


def choose_replica(
    replicas: Sequence[ReplicaInfo],
    in_flight: Mapping[str, int],
    down: Collection[str],
    affinity: bytes,
    others: Mapping[str, int] | None = None,
) -> ReplicaInfo | None:
    """Choose a replica.

    Args:
        replicas: the replicas that the cluster lists as ready.
        in_flight: requests of this gateway by replica id; a missing id counts as 0.
        down: ids of replicas that are not available; they are never chosen.
        affinity: key that is equal for requests that share a prefix; see `affinity_key`.
        others: requests of other gateways by replica id; None if this gateway's part of the
            reported requests is unknown.

    Returns:
        The choice, or None when every replica is down or there is none.
    """
    ready = [replica for replica in replicas if replica.replica_id not in down]
    ready = [replica for replica in ready if not replica.is_fallback] or ready
    loads = {each.replica_id: _load(each, in_flight, others) for each in ready}
    best: list[ReplicaInfo] = []
    least = 0
    for replica in ready:
        load = loads[replica.replica_id]
        if not best or load < least:
            best, least = [replica], load
        elif load == least:
            best.append(replica)
    if len(best) <= 1:
        return best[0] if best else None
    return max(best, key=lambda replica: rendezvous_weight(replica.replica_id, affinity))


def _load(
    replica: ReplicaInfo, in_flight: Mapping[str, int], others: Mapping[str, int] | None
) -> int:
    """Return the number of requests at a replica.

    Without `others`, it is the larger of this gateway's own number and the reported one.
    """
    own = in_flight.get(replica.replica_id, 0)
    if others is None:
        return max(own, replica.reported)
    return own + others.get(replica.replica_id, 0)


def rendezvous_weight(replica_id: str, affinity: bytes) -> bytes:
    """Return the replica's weight for this key: 8 bytes, compared as a number (highest random
    weight)."""
    return hashlib.blake2b(affinity, key=replica_id.encode()[:64], digest_size=8).digest()


def affinity_key(request: Mapping[str, Any]) -> bytes:
    """Return the first `AFFINITY_CHARS` characters of a request's prompt, as bytes.

    Args:
        request: the decoded body of a request of any API, not yet checked.

    Returns:
        The key; empty when there is no prompt.
    """
    parts = [_head(request[name]) for name in _PROMPT_FIELDS if request.get(name)]
    return b"\n".join(parts)[:AFFINITY_CHARS]


def _head(prompt: Any) -> bytes:
    """Return the prompt's beginning; of a list, as many items as are needed."""
    if isinstance(prompt, str):
        return prompt[:AFFINITY_CHARS].encode()
    if not isinstance(prompt, list):
        return repr(prompt)[:AFFINITY_CHARS].encode()
    parts: list[str] = []
    chars = 0
    for item in prompt[:AFFINITY_CHARS]:
        content = item.get("content") if isinstance(item, dict) else item
        part = content if isinstance(content, str) else repr(content)
        parts.append(part[: AFFINITY_CHARS - chars])
        chars += len(parts[-1]) + 1
        if chars >= AFFINITY_CHARS:
            break
    return "\n".join(parts).encode()

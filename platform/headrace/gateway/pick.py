"""Which replica answers: the least loaded, and among equals the one that saw this prefix before.

    load(r) = requests of this gateway in flight to r + requests that r reported as waiting

The least load wins. Ties go to the replica with the highest rendezvous weight for the request's
affinity key, so a conversation stays where its prefix is cached, and losing one replica moves only
the conversations that it held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.gateway.backend import ReplicaInfo

AFFINITY_CHARS = 1024


def pick(
    replicas: Sequence[ReplicaInfo],
    in_flight: Mapping[str, int],
    down: Collection[str],
    affinity: bytes,
) -> ReplicaInfo | None:
    """Choose a replica.

    Args:
        replicas: those that the cluster calls ready.
        in_flight: requests of this gateway by replica id; a missing id counts as 0.
        down: ids that failed a moment ago; they are never chosen.
        affinity: what is alike for requests that share a prefix; see `affinity_key`.

    Returns:
        The choice, or None when every replica is down or there is none.
    """
    best: list[ReplicaInfo] = []
    least = 0
    for replica in replicas:
        if replica.replica_id in down:
            continue
        load = in_flight.get(replica.replica_id, 0) + replica.waiting
        if not best or load < least:
            best, least = [replica], load
        elif load == least:
            best.append(replica)
    if len(best) <= 1:
        return best[0] if best else None
    return max(best, key=lambda replica: rendezvous_weight(replica.replica_id, affinity))


def rendezvous_weight(replica_id: str, affinity: bytes) -> bytes:
    """The replica's weight for this key: 8 bytes, compared as a number (highest random weight)."""
    return hashlib.blake2b(affinity, key=replica_id.encode()[:64], digest_size=8).digest()


def affinity_key(request: Mapping[str, Any]) -> bytes:
    """The first `AFFINITY_CHARS` characters of a request's prompt, as bytes.

    Args:
        request: the decoded body of a completions or chat request; of any content.

    Returns:
        The key; empty when there is no prompt.
    """
    if "messages" in request:
        return _head(request["messages"])
    return _head(request.get("prompt", ""))


def _head(prompt: Any) -> bytes:
    """The prompt's beginning; of a list, as many items as it takes."""
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

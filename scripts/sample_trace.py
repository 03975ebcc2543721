"""Cut the simulator's sample trace out of a published one.

    python scripts/sample_trace.py TRACE.jsonl > platform/headrace/simulate/traces/sample.jsonl

Takes every 33rd conversation with all its requests, in the trace's order, and numbers the blocks
again. A conversation is the set of requests with the same second block: the first one holds the
service's system prompt, which nearly all requests share.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

EVERY = 33


def sample(requests: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the requests of every 33rd conversation."""
    conversations: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for request in requests:
        ids = request["hash_ids"]
        conversation = ids[1] if len(ids) > 1 else ids[0]
        if conversations.setdefault(conversation, len(conversations)) % EVERY == 0:
            yield request | {"hash_ids": [blocks.setdefault(one, len(blocks)) for one in ids]}


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines()
    for request in sample(map(json.loads, lines)):
        print(json.dumps(request))

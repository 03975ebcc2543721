"""Ids of files and batches, and the names of their records.

An id is a prefix, a thread and a name, like those of responses
(`headrace.gateway.conversations.state_ids`), so that it leads to its records without an index.
"""

from __future__ import annotations

import re
import secrets

from headrace.gateway.conversations.state_ids import NAME_BYTES, THREAD_BYTES, ThreadId

FILE, BATCH = "file-", "batch_"
_ID = re.compile(r"(file-|batch_)([0-9a-f]{16})([0-9a-f]{24})")

INDEX_THREAD = "0" * 16
"""Thread of a tenant with one record for each of its files and batches."""
JOBS_THREAD = "0" * 15 + "1"
"""Thread of the gateways' own records with one for each unfinished batch of any tenant."""
BATCH_RECORD, CANCEL_RECORD, PROGRESS_RECORD, OUTCOME_RECORD = (
    "batch",
    "cancel",
    "progress",
    "outcome",
)
INDEX_FILE, INDEX_BATCH, INDEX_UNFINISHED = "file-", "batch-", "unfinished-"
"""Beginnings of the names of records in the index."""
LEASE = "lease-"
"""Beginning of the names of a batch's leases; the highest number is in force."""


def new_id(prefix: str) -> str:
    """Return the id of a new file or batch, which is a new thread."""
    return prefix + secrets.token_hex(THREAD_BYTES) + secrets.token_hex(NAME_BYTES)


def new_thread() -> str:
    """Return the name of a new thread."""
    return secrets.token_hex(THREAD_BYTES)


def parse_id(prefix: str, given: str) -> ThreadId | None:
    """Return the thread and name of an id with this prefix; None if it is no such id."""
    found = _ID.fullmatch(given)
    return None if found is None or found[1] != prefix else ThreadId(found[2], found[3])


def index_record(kind: str, place: ThreadId) -> str:
    """Return the name of the record in an index, or among the jobs, of a file or batch."""
    return kind + place.thread + place.name


def part_record(number: int) -> str:
    """Return the name of a part of a file."""
    return f"part-{number:06d}"


def line_record(number: int) -> str:
    """Return the name of the record of a line's answer."""
    return f"line-{number:08d}"


def number_of_line(record: str) -> int:
    """Return the number of the line that a record answers."""
    return int(record.removeprefix("line-"))


def lease_record(number: int) -> str:
    """Return the name of a lease."""
    return f"{LEASE}{number:08d}"


def number_of_lease(record: str) -> int:
    """Return the number of a lease."""
    return int(record.removeprefix(LEASE))

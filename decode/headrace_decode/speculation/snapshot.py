"""A memory's kept segments as one run of bytes, so that a replica starts warm.

    magic | u32 length of the manifest | u64 checksum of the manifest | manifest (JSON)
          | segments: SEGMENT [n] | calibration: f8 [cells, 2] | tokens: i4

The manifest has the lengths, the names behind interned numbers, and the checksums of segments and
calibration: if any of these is damaged, the snapshot is refused whole. Each segment has a checksum
over its tokens; those that do not match are left out and named. Open requests are not in it, nor is
the failure memory, which is forgotten within hours anyway.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace_decode.speculation.memory import Key, Memory
from headrace_decode.speculation.record import DamagedError, SegmentRecord, checksum
from headrace_decode.speculation.transfer import put_in, record_of

MAGIC = b"HRMEM001"
_HEAD = struct.Struct("<IQ")
_COPIED = ("uid", "created_s", "expires_s", "accepted", "refused", "version", "source")
_NAMED = ("partition", "corpus", "model", "tokenizer", "tag")
SEGMENT = np.dtype(
    [
        ("uid", "<u8"),
        ("created_s", "<f8"),
        ("expires_s", "<f8"),
        ("accepted", "<u4"),
        ("refused", "<u4"),
        ("version", "<u4"),
        ("source", "<u4"),
        ("tokens", "<u4"),
        *[(name, "<u4") for name in _NAMED],  # index into the manifest's names
        ("checksum", "<u8"),
    ]
)


@dataclass(frozen=True)
class Restored:
    """What became of a snapshot: segments put in, those that expired or found no room, and for
    each damaged one a line that names it."""

    segments: int
    left_out: int
    damaged: tuple[str, ...]


def save(memory: Memory) -> bytes:
    """All kept segments that have not expired, oldest first within a partition."""
    names: dict[Any, int] = {}
    rows, runs = [], []
    with memory.lock:
        now_s = memory.clock()
        for key, part in memory.pool.kept():
            assert isinstance(key, Key)
            for header in memory.pool.segments(part):
                record = record_of(memory, header)
                if record.expires_s <= now_s:
                    continue
                run = record.tokens.astype("<i4").tobytes()
                named = (
                    (key.scope, key.tenant),
                    record.corpus,
                    record.model.hex(),
                    record.tokenizer.hex(),
                    record.tag,
                )
                numbers = [names.setdefault(name, len(names)) for name in named]
                fields = [getattr(record, name) for name in _COPIED]
                rows.append((*fields, len(record.tokens), *numbers, checksum(run)))
                runs.append(run)
        calibration = memory.calibration.counts.astype("<f8").tobytes()
        versions = [
            [*name, int(memory.pool.versions[number])]
            for number, name in enumerate(memory.corpora.names)
            if isinstance(name, tuple)
        ]
    segments = np.array(rows, SEGMENT).tobytes()
    manifest = json.dumps(
        {
            "segments": len(rows),
            "tokens_bytes": sum(map(len, runs)),
            "calibration_bytes": len(calibration),
            "checksum": checksum(segments, calibration),
            "names": list(names),
            "versions": versions,
        }
    ).encode()
    head = MAGIC + _HEAD.pack(len(manifest), checksum(manifest))
    return b"".join([head, manifest, segments, calibration, *runs])


def restore(memory: Memory, data: bytes, name: str) -> Restored:
    """Put a snapshot's segments into a memory, beside what it has.

    Args:
        name: what the snapshot is called in errors, such as its path.

    Raises:
        DamagedError: refused whole; the memory is as it was.
    """
    manifest, segments, calibration, runs = _open(data, name)
    damaged, left_out, put = [], 0, 0
    with memory.lock:
        now_s = memory.clock()
        for scope, tenant, corpus, version in manifest["versions"]:
            memory.pool.versions[memory.corpus_number(Key(scope, tenant), corpus)] = version
        if calibration.shape == memory.calibration.counts.shape:
            memory.calibration.restore(calibration)
        at = 0
        for number, fields in enumerate(segments):
            run = runs[at : at + 4 * int(fields["tokens"])]
            at += 4 * int(fields["tokens"])
            scope, tenant = manifest["names"][fields["partition"]]
            if checksum(run) != fields["checksum"]:
                damaged.append(
                    f"{name}: segment {number} ({fields['tokens']} tokens of {scope} {tenant!r}) "
                    "has another checksum than it was written with"
                )
                continue
            record = _record(fields, manifest["names"], run)
            live = record.expires_s > now_s
            kept = put_in(memory, Key(scope, tenant), record, foreign=False) if live else None
            put, left_out = put + (kept is not None), left_out + (kept is None)
    return Restored(put, left_out, tuple(damaged))


def _open(data: bytes, name: str) -> tuple[dict[str, Any], Any, Any, memoryview]:
    start = len(MAGIC) + _HEAD.size
    if data[: len(MAGIC)] != MAGIC or len(data) < start:
        raise DamagedError(f"{name} is no snapshot: it begins with {data[:8]!r}, not {MAGIC!r}")
    length, expected = _HEAD.unpack_from(data, len(MAGIC))
    text = data[start : start + length]
    if len(text) != length or checksum(text) != expected:
        raise DamagedError(f"{name}: its manifest has another checksum than was written")
    manifest = json.loads(text)
    sizes = (manifest["segments"] * SEGMENT.itemsize, manifest["calibration_bytes"])
    whole = start + length + sum(sizes) + manifest["tokens_bytes"]
    if len(data) != whole:
        raise DamagedError(f"{name} has {len(data)} bytes; its manifest says {whole}")
    view = memoryview(data)[start + length :]
    tables = view[: sum(sizes)]
    if checksum(tables) != manifest["checksum"]:
        raise DamagedError(f"{name}: its tables have another checksum than was written")
    segments = np.frombuffer(tables[: sizes[0]], SEGMENT)
    calibration = np.frombuffer(tables[sizes[0] :], "<f8").reshape(-1, 2)
    return manifest, segments, calibration, view[sum(sizes) :]


def _record(fields: Any, names: list[Any], run: memoryview) -> SegmentRecord:
    return SegmentRecord(
        uid=int(fields["uid"]),
        created_s=float(fields["created_s"]),
        expires_s=float(fields["expires_s"]),
        accepted=int(fields["accepted"]),
        refused=int(fields["refused"]),
        version=int(fields["version"]),
        source=int(fields["source"]),
        corpus=names[fields["corpus"]],
        model=bytes.fromhex(names[fields["model"]]),
        tokenizer=bytes.fromhex(names[fields["tokenizer"]]),
        tag=names[fields["tag"]],
        tokens=np.frombuffer(run, "<i4").astype(np.int32),
    )

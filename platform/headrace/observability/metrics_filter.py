"""The filter of `GET /metrics?name[]=NAME`, as Prometheus' own client libraries have it."""

from __future__ import annotations

from collections.abc import Set
from urllib.parse import parse_qs

SUFFIXES = (b"_bucket", b"_sum", b"_count", b"_total", b"_created")


def wanted_names(target: str) -> frozenset[bytes]:
    """Return the names that a request's target asks for; empty if it asks for all metrics."""
    query = parse_qs(target.partition("?")[2])
    return frozenset(name.encode() for name in query.get("name[]", ()))


def filter_metrics(page: bytes, names: Set[bytes]) -> bytes:
    """Return the metrics with these names, with their help and type.

    The samples of a histogram or counter have its name and one of `SUFFIXES`. Each of these names
    stands for the whole metric.
    """
    lines: list[bytes] = []
    metric, is_wanted = b"", False
    for line in page.splitlines(keepends=True):
        if line.startswith((b"# HELP ", b"# TYPE ")):
            name = line.split(b" ", 3)[2].strip()
        else:
            name = line.partition(b"{")[0].partition(b" ")[0]
            if metric and name.removeprefix(metric) in (b"", *SUFFIXES):
                name = metric
        if name != metric:
            metric = name
            is_wanted = not names.isdisjoint((name, *(name + suffix for suffix in SUFFIXES)))
        if is_wanted:
            lines.append(line)
    return b"".join(lines)

"""`headrace corpus`: load, list and remove the corpora that speculative decoding drafts from.

A corpus is sent in parts of about a megabyte, so that progress can be shown. Its new version comes
into force with the last part. Each file is one document; a long file is split into several.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headrace.cli import client, state
from headrace.cli.console import CliError, human_bytes, stderr, stdout

PATH = "/headrace/v1/corpora"
PART_BYTES = 1_000_000
PART_TIMEOUT_S = 600.0


def load(
    paths: list[Path],
    *,
    corpus: str,
    tenant: str | None,
    ttl_s: float | None,
    name: str | None,
) -> None:
    """Load files, and the files in folders, as a new version of a corpus.

    Raises:
        CliError: a path cannot be read or holds no text, or the endpoint refuses.
    """
    instance = client.running_instance(name)
    files = list(_files(paths))
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    common = {"tenant": tenant, "ttl_s": ttl_s, "total_chars": total}
    answer: dict[str, Any] = {}
    version, sent, begun = None, 0, False
    with _Bar(stderr(), total) as bar:
        for number, (texts, done_bytes, last) in enumerate(_parts(_texts(files, paths))):
            body = {**common, "texts": texts, "part": number, "version": version, "more": not last}
            answer = _call(instance, "PUT", corpus, body)
            version, begun = answer["version"], True
            sent += done_bytes
            bar.show(sent)
    if not begun:
        raise CliError("there is no text in these files", 2)
    _report(corpus, tenant, answer)


def show_list(name: str | None, *, as_json: bool) -> None:
    """Print the corpora, merged over all replicas."""
    found = _merged(_call(client.running_instance(name), "GET", None)["replicas"])
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        stdout().print("no corpus is loaded")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("corpus", "for", "version"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens", "texts", "accepted", "replicas"):
        table.add_column(column, justify="right")
    for each in found:
        tenant = "all tenants" if each["tenant"] is None else each["tenant"]
        counts = (f"{each[key]:,}" for key in ("tokens", "segments"))
        drafts = f"{each['accepted']:,} of {each['accepted'] + each['refused']:,}"
        names = (each["corpus"], tenant, str(each["version"]))
        table.add_row(*names, *counts, drafts, str(each["replicas"]))
    stdout().print(table)


def remove(corpus: str, *, tenant: str | None, name: str | None) -> None:
    """Remove a corpus from every replica."""
    answer = _call(client.running_instance(name), "DELETE", corpus, tenant=tenant)
    _warn(answer["replicas"])
    stdout().print(f'"{corpus}" is removed', markup=False)


def stats(name: str | None, *, as_json: bool) -> None:
    """Print how full each replica's memory is."""
    replicas = _call(client.running_instance(name), "GET", None)["replicas"]
    if as_json:
        print(json.dumps(replicas, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("replica")
    for column in ("used", "capacity", "tokens", "segments", "evicted", "tenants", "corpora"):
        table.add_column(column, justify="right")
    for each in replicas:
        if "error" in each:
            continue
        memory = each["stats"]
        sizes = (human_bytes(memory[key]) for key in ("used_bytes", "capacity_bytes"))
        keys = ("kept_tokens", "segments", "evicted_segments", "partitions")
        counts = (f"{memory[key]:,.0f}" for key in keys)
        table.add_row(each["replica_id"][:8], *sizes, *counts, str(len(each["corpora"])))
    stdout().print(table)
    _warn(replicas)


def _call(
    instance: state.Instance,
    method: str,
    corpus: str | None,
    body: Any = None,
    tenant: str | None = None,
) -> Any:
    path = PATH if corpus is None else f"{PATH}/{quote(corpus, safe='')}"
    query = {} if tenant is None else {"tenant": tenant}
    return client.call(instance, method, path, body, query, PART_TIMEOUT_S)


def _files(paths: list[Path]) -> Iterator[Path]:
    """Yield the named files, and all files in named folders that are not hidden."""
    for path in paths:
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.is_file())
            yield from (p for p in below if not _hidden(p.relative_to(path)))
        elif path.is_file():
            yield path
        else:
            raise CliError(f'"{path}" is neither a file nor a folder', 2)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _texts(files: list[Path], named: list[Path]) -> Iterator[str]:
    """Yield each file's text, split if it is long. Skip files in folders that are not UTF-8."""
    for file in files:
        try:
            text = file.read_text("utf-8")
        except OSError as error:
            raise CliError(f'cannot read "{file}": {error.strerror or error}', 2) from None
        except UnicodeDecodeError:
            if file in named:
                raise CliError(f'"{file}" is not UTF-8 text', 2) from None
            stderr().print(f"warning: {file} is not UTF-8 text; it is skipped", markup=False)
            continue
        while len(text) > PART_BYTES:
            end = text.rfind("\n", 0, PART_BYTES) + 1 or PART_BYTES
            yield text[:end]
            text = text[end:]
        if text:
            yield text


def _parts(texts: Iterator[str]) -> Iterator[tuple[list[str], int, bool]]:
    """Yield (texts, their bytes, whether they are the last) in parts of about PART_BYTES."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > PART_BYTES:
            yield part, size, False
            part, size = [], 0
        part.append(text)
        size += len(text.encode())
    if part:
        yield part, size, True


def _report(corpus: str, tenant: str | None, answer: dict[str, Any]) -> None:
    _warn(answer["replicas"])
    good = [each for each in answer["replicas"] if "error" not in each]
    whose = "all tenants" if tenant is None else "one tenant"
    tokens = max(each["tokens"] for each in good)
    words = "1 replica" if len(good) == 1 else f"{len(good)} replicas"
    line = f'"{corpus}" version {answer["version"]}: {tokens:,} tokens for {whose}, {words}'
    stdout().print(line, markup=False)


def _warn(replicas: list[dict[str, Any]]) -> None:
    for each in replicas:
        if "error" in each:
            who = each["replica_id"][:8] or "?"
            stderr().print(f"warning: replica {who}: {each['error']}", markup=False)


def _merged(replicas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each version of a corpus: that of the replica with the most tokens, with
    the sums of accepted and refused tokens."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for each in (corpus for replica in replicas for corpus in replica.get("corpora", [])):
        key = (each["tenant"] or "", each["corpus"], each["version"])
        before = found.get(key, {"replicas": 0, "accepted": 0, "refused": 0, "tokens": -1})
        larger = each if each["tokens"] > before["tokens"] else before
        counts = {name: each[name] + before[name] for name in ("accepted", "refused")}
        found[key] = {**larger, **counts, "replicas": before["replicas"] + 1}
    return [found[key] for key in sorted(found)]


class _Bar:
    """Progress of a load: a bar on a terminal, else a line for each tenth."""

    def __init__(self, console: Console, total_bytes: int) -> None:
        self._total = total_bytes
        self._console = console
        self._tenth = 0
        columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bars = Progress(
            TextColumn("loading"), *columns, console=console, disable=not console.is_terminal
        )
        self._task = self._bars.add_task("loading", total=total_bytes)

    def __enter__(self) -> _Bar:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def show(self, done_bytes: int) -> None:
        """Show that this many bytes have been sent."""
        self._bars.update(self._task, completed=done_bytes)
        tenth = 10 * done_bytes // max(self._total, 1)
        if not self._console.is_terminal and tenth > self._tenth:
            self._tenth = tenth
            done, total = human_bytes(done_bytes), human_bytes(self._total)
            self._console.print(f"loaded {done} of {total}", markup=False)

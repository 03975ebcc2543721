"""The adapters that one replica serves: finds the adapter of a name, and loads it at first use.

An adapter comes from the configuration, from a subfolder of `loading_path`, or from an
administrator. Its source is read again when a request uses it and the last look is `CHECK_S` old.
If the files have changed, later requests get the new content, as a new snapshot under a new number.
Requests that run keep theirs.

Made and used on the replica's event loop; threads read the sources.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from headrace_engine.adapters.loaded import LoadedAdapters
from headrace_engine.adapters.settings import (
    MAX_ADAPTERS,
    AdapterRef,
    AdapterSettings,
    why_bad_name,
)
from headrace_engine.adapters.snapshots import Snapshots
from headrace_engine.adapters.sources import (
    AdapterError,
    AdapterUnreachableError,
    FileFacts,
    file_facts,
    join,
    list_subfolders,
)

logger = logging.getLogger("headrace.engine")

CHECK_S = 5.0
"""Seconds after which an adapter's source is looked at again."""
LIST_S = 10.0
"""Seconds after which the folder of adapters is listed again."""
LOCAL_S = 60.0
"""Seconds for which an adapter's prompts are prefilled here after a prefill replica could not use
it."""
MAX_VERSIONS = 2 * MAX_ADAPTERS
"""Maximum number of contents that a replica keeps, replaced ones included."""
THREADS = 4


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One content of an adapter.

    Attributes:
        number: vLLM's number for it; never used for other content.
        path: folder of its snapshot.
    """

    name: str
    number: int
    digest: str
    source: str
    path: str


class AdapterEngine(Protocol):
    """An engine that loads adapters (`headrace_engine.vllm.llm`)."""

    capacity: int

    async def load(self, version: AdapterVersion) -> None:
        """Load an adapter. Raises AdapterError if the engine refuses it."""

    def offer(self, version: AdapterVersion) -> None:
        """Let requests name an adapter."""

    def withdraw(self, name: str) -> None:
        """Let no more requests name an adapter."""


@dataclass(slots=True)
class _Known:
    """The last look at a name's source: its files and their snapshot, or the error."""

    source: str
    checked_s: float
    facts: tuple[FileFacts, ...] = ()
    version: AdapterVersion | None = None
    error: AdapterError = field(default_factory=AdapterError)


class _Look(NamedTuple):
    """Result of a look at a source: facts and digest, or an error."""

    checked_s: float
    facts: tuple[FileFacts, ...] = ()
    digest: str = ""
    error: AdapterError | None = None


class AdapterRegistry:
    """The adapters of one replica.

    Args:
        settings: the configured adapters.
        engine: loads them.
        snapshots: keeps their content.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        engine: AdapterEngine,
        snapshots: Snapshots,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._engine, self._snapshots, self._clock = engine, snapshots, clock
        self._added: dict[str, str] = {}
        self._listed: tuple[str, ...] = ()
        self._listed_s = float("-inf")
        self._known: dict[str, _Known] = {}
        self._looks: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self._count = itertools.count(1)
        self._versions: OrderedDict[tuple[str, str], AdapterVersion] = OrderedDict()
        self._by_number: dict[int, AdapterVersion] = {}
        self._users: Counter[int] = Counter()
        self._local_until_s: dict[str, float] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="adapters")
        self._loading = asyncio.Lock()
        self.loaded = LoadedAdapters(engine.capacity)
        self.on_change: list[Callable[[], None]] = []
        """Called when the loaded adapters change."""

    # ---- names ----------------------------------------------------------------------------

    async def names(self) -> list[str]:
        """Return the names of all adapters."""
        await self._list()
        prefix = self.settings.model_id + ":"
        listed = (prefix + folder for folder in self._listed)
        return list(dict.fromkeys([*self.settings.sources, *self._added, *listed]))

    def set_added(self, sources: Mapping[str, str]) -> None:
        """Set the adapters that administrators have added, with their sources."""
        for name in self._added.keys() - sources.keys():
            self._engine.withdraw(name)
            self._known.pop(name, None)
        self._added = dict(sources)

    def why_not_added(self, name: str) -> str | None:
        """Return why administrators cannot add an adapter of this name; None if they can."""
        if why := why_bad_name(name, self.settings.model_id):
            return why
        if name in self.settings.sources:
            return f"the configuration has an adapter named {name!r}"
        if len(self._added) >= MAX_ADAPTERS and name not in self._added:
            return f"there are {MAX_ADAPTERS} added adapters, the maximum"
        return None

    # ---- finding --------------------------------------------------------------------------

    async def find(self, name: str, *, now: bool = False) -> AdapterVersion | None:
        """Return the content that requests for a name get; None if there is no such adapter.

        Args:
            now: read the source again, however recent the last look is.

        Raises:
            AdapterError: the adapter cannot be used.
        """
        source = await self._source(name)
        if source is None:
            self._engine.withdraw(name)
            return None
        known = self._known.get(name)
        is_fresh = known is not None and self._clock() - known.checked_s < CHECK_S
        if known is None or known.source != source or now or not is_fresh:
            last = known if known is not None and known.source == source else None
            look = await self._run(
                ("name", name), lambda: self._look(source, None if now else last)
            )
            known = self._judge(name, source, look, None if now else last)
            self._known[name] = known
        if known.version is not None:
            self._engine.offer(known.version)
            return known.version
        raise type(known.error)(str(known.error))

    async def find_ref(self, ref: AdapterRef) -> AdapterVersion:
        """Return the content that another replica asks for.

        Raises:
            AdapterError: this replica cannot get the content.
        """
        if why_bad_name(ref.name, self.settings.model_id):
            raise AdapterError(f"{ref.name!r} is no name of an adapter")
        known = self.version(ref.name, ref.digest)
        if known is not None:
            self._versions.move_to_end((ref.name, ref.digest))
            return known
        path = await self._run(("digest", ref.digest), lambda: self._open(ref))
        return self._version(ref.name, ref.digest, ref.source, path)

    def version(self, name: str, digest: str) -> AdapterVersion | None:
        """Return a content that this replica has served under a name; None if it has not."""
        return self._versions.get((name, digest))

    def ref_of(self, number: int) -> AdapterRef | None:
        """Return what another replica needs to get the same content; None for another number."""
        version = self._by_number.get(number)
        if version is None:
            return None
        return AdapterRef(version.name, version.digest, version.source)

    def record_remote_failure(self, digest: str) -> None:
        """Record that a prefill replica could not use a content."""
        now_s = self._clock()
        self._local_until_s = {d: s for d, s in self._local_until_s.items() if s > now_s}
        self._local_until_s[digest] = now_s + LOCAL_S

    def why_local(self, digest: str) -> str | None:
        """Return why prompts with a content are prefilled here; None if they need not be."""
        if self._local_until_s.get(digest, 0.0) <= self._clock():
            return None
        return "a prefill replica cannot use the request's LoRA adapter"

    # ---- loading --------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, number: int) -> AsyncIterator[None]:
        """Have the engine load the adapter of this number unless it is loaded, and keep its files
        while the context is open.

        Raises:
            AdapterError: the engine refuses it.
        """
        version = self._by_number.get(number)
        if version is None:
            raise AdapterError("it was replaced before the request began; try again")
        self._users[number] += 1
        try:
            await self._load(version)
            yield
        finally:
            self._users[number] -= 1
            self._users += Counter()  # drops numbers with a count of 0

    async def _load(self, version: AdapterVersion) -> None:
        if self.loaded.use(version.number):
            return
        async with self._loading:
            if self.loaded.use(version.number):
                return
            began = self._clock()
            await self._engine.load(version)
            self.loaded.add(version.number, version.digest, self._clock() - began)
        for tell in self.on_change:
            tell()

    def report_fields(self) -> dict[str, Any]:
        """Return the adapters' fields of this replica's report."""
        return {
            "adapters": self.loaded.digests[-MAX_ADAPTERS:],
            "adapter_slots": self._engine.capacity,
            "adapter_load_s": self.loaded.load_s,
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the state for JSON."""
        loaded = set(self.loaded.digests)
        names = {each.name for each in self._by_number.values() if each.digest in loaded}
        return {
            "loaded": sorted(names),
            "loads": self.loaded.loads,
            "load_s": round(self.loaded.load_s, 6),
            "capacity": self._engine.capacity,
        }

    def close(self) -> None:
        """Release the snapshots; running threads finish."""
        for task in self._looks.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._snapshots.close()

    # ---- inside ---------------------------------------------------------------------------

    async def _source(self, name: str) -> str | None:
        for sources in (self.settings.sources, self._added):
            if name in sources:
                return sources[name]
        path, prefix = self.settings.loading_path, self.settings.model_id + ":"
        if path is None or not name.startswith(prefix):
            return None
        await self._list()  # a client's name costs no look at the store
        folder = name.removeprefix(prefix)
        return join(path, folder) if folder in self._listed else None

    async def _list(self) -> None:
        """List the folder of adapters again if the last list is old; keep it on failure."""
        path = self.settings.loading_path
        if path is None or self._clock() - self._listed_s < LIST_S:
            return
        try:
            found = await self._run(("list", path), lambda: list_subfolders(path))
        except AdapterError as error:
            logger.warning("the folder of LoRA adapters is not listed: %s", error)
        else:
            prefix = self.settings.model_id
            good = [each for each in found if not why_bad_name(f"{prefix}:{each}", prefix)]
            if len(good) > MAX_ADAPTERS:
                logger.warning("%d of %d LoRA adapters are served", MAX_ADAPTERS, len(good))
            self._listed = tuple(good[:MAX_ADAPTERS])
        self._listed_s = self._clock()

    def _look(self, source: str, last: _Known | None) -> _Look:
        """Look at a source. Runs on a thread; never raises `AdapterError`."""
        checked_s = self._clock()
        try:
            facts = file_facts(source)
            if last is not None and last.version is not None and last.facts == facts:
                return _Look(checked_s, facts, last.version.digest)
            return _Look(checked_s, facts, self._snapshots.take(source))
        except AdapterError as error:
            return _Look(checked_s, error=error)

    def _judge(self, name: str, source: str, look: _Look, last: _Known | None) -> _Known:
        """Return what a look at a source means for its name."""
        error = look.error
        if error is None:
            path = str(self._snapshots.root / look.digest)
            version = self._version(name, look.digest, source, path)
            return _Known(source, look.checked_s, look.facts, version)
        if last is not None and last.version is not None:  # its files may be half replaced
            logger.warning("the LoRA adapter %s stays as it is: %s", name, error)
            return _Known(source, look.checked_s, last.facts, last.version)
        return _Known(source, look.checked_s, error=error)

    def _open(self, ref: AdapterRef) -> str:
        """Return the folder of a snapshot, taking it from its source if it is not here. Runs on a
        thread."""
        path = self._snapshots.open(ref.digest)
        if path is None and self._snapshots.take(ref.source) == ref.digest:
            path = self._snapshots.open(ref.digest)
        if path is None:
            raise AdapterError(f"{ref.source} has other content here than at the caller")
        return str(path)

    def _version(self, name: str, digest: str, source: str, path: str) -> AdapterVersion:
        """Return the version of this content, which keeps its number."""
        version = self._versions.get((name, digest))
        if version is None or version.source != source:
            number = next(self._count) if version is None else version.number
            version = AdapterVersion(name, number, digest, source, path)
            self._versions[name, digest] = self._by_number[number] = version
            self._drop_old()
        self._versions.move_to_end((name, digest))
        return version

    def _drop_old(self) -> None:
        """Drop the least recently used versions above `MAX_VERSIONS` that no request uses."""
        for key in list(self._versions)[:-1]:
            version = self._versions[key]
            if len(self._versions) <= MAX_VERSIONS:
                break
            if version.number not in self._users:
                del self._versions[key], self._by_number[version.number]
                if all(each.digest != version.digest for each in self._versions.values()):
                    self._snapshots.release(version.digest)

    async def _run(self, key: tuple[str, str], work: Callable[[], Any]) -> Any:
        """Run work on a thread, once for all who wait for the same key.

        Raises:
            AdapterUnreachableError: it takes longer than `fetch_timeout_s`.
        """
        task = self._looks.get(key)
        if task is None:
            loop = asyncio.get_running_loop()
            task = self._looks[key] = asyncio.ensure_future(
                loop.run_in_executor(self._threads, work)
            )
            task.add_done_callback(lambda done: self._looks.pop(key, None))
        timeout_s = self.settings.fetch_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(task), timeout_s)
        except TimeoutError:
            raise AdapterUnreachableError(
                f"the LoRA adapter is not read after {timeout_s:g} s; try again"
            ) from None

"""A batch whose gateways die at any point, beside a model that answers each line once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.batches import batch_execution
from headrace.gateway.batches.batch_execution import LEASE_S, BatchExecution, BatchLimits
from headrace.gateway.batches.batch_ids import BATCH, FILE, new_id, new_thread
from headrace.gateway.batches.batch_records import JobEntry, StoredBatch, StoredFile
from headrace.gateway.batches.line_gate import LineGate
from headrace.gateway.batches.line_pacer import LineLoad
from headrace.gateway.batches.line_relay import LineAnswer
from headrace.gateway.batches.tenant_batches import LeaseLostError, TenantBatches
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.api_keys import ANONYMOUS
from headrace.gateway.kept_records.record_cipher import RecordCipher
from headrace.gateway.kept_records.sqlite_store import SqliteStore
from tests.unit.batch_fakes import lines_of
from tests.unit.gateway_fakes import CHAT

LIMITS = BatchLimits(1000, 10_000, 10_000_000)


@pytest.fixture(scope="module", autouse=True)
def many_beats() -> Iterator[None]:
    """Progress is kept at every point of a run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_execution, "BEAT_S", 0.0)
        yield


class KilledError(Exception):
    """The end of a gateway."""


class Gateway:
    """A gateway that dies at one of its uses of the store, before or after it.

    As `StateRunner`: the executions use it in its place.
    """

    def __init__(self, batches: TenantBatches, uses: int, *, after: bool) -> None:
        self._batches, self._left, self._after = batches, uses, after

    async def run(self, tenant: str | None, work: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        self._left -= 1
        if self._left < 0 or (self._left == 0 and not self._after):
            raise KilledError
        result = work(self._batches, *args)
        if self._left == 0:
            raise KilledError
        return result

    run_long = run


class Replica:
    """Answers each line with its text, or with an error, and a number that is never the same."""

    def __init__(self, refused: frozenset[int]) -> None:
        self._refused, self.sent = refused, 0

    def model_of(self, body: bytes, caller: object) -> str:
        return "m"

    async def send(self, path: str, body: bytes, caller: object) -> LineAnswer:
        self.sent += 1
        number = self.sent
        await asyncio.sleep(0)
        text = json.loads(body)["messages"][0]["content"]
        status = 400 if int(text) in self._refused else 200
        return LineAnswer(status, str(number), json.dumps({"text": text}).encode())


class World:
    """A batch in a store, and the gateways that run it one after another."""

    def __init__(self, folder: Path, lines: int, refused: frozenset[int]) -> None:
        self.now_s = 1e9
        store = SqliteStore(folder, 1e9, sys.maxsize)
        self.batches = TenantBatches(store, RecordCipher(b"s" * 16), None, lambda: self.now_s)
        data = lines_of(map(str, range(lines)))
        file = StoredFile(new_id(FILE), "in", "batch", len(data), 1, 0, 2 * 10**9)
        self.batches.put_part(file.id, 0, data)
        self.batches.add_file(file)
        self.batch = StoredBatch(
            *(new_id(BATCH), file.id, CHAT, b"null", int(self.now_s)),
            *(new_id(FILE), new_id(FILE), new_thread(), 10_000),
        )
        self.batches.create_batch(self.batch, 9, sys.maxsize, 10_000)
        self.replica = Replica(refused)

    def execution(
        self, uses: int = sys.maxsize, *, after: bool = False, kind: type[Gateway] = Gateway
    ) -> BatchExecution:
        """A gateway's run of the batch, after the lease before has expired."""
        self.now_s += LEASE_S + 1
        lease = self.batches.acquire(self.batch.id, f"gateway at {self.now_s}", LEASE_S)
        assert lease is not None
        state: Any = kind(self.batches, uses, after=after)
        replica: Any = self.replica
        return BatchExecution(
            *(state, JobEntry(self.batch.id, None, ""), lease),
            owner=f"gateway at {self.now_s}",
            caller=lambda: ANONYMOUS,
            relay=replica,
            gate=LineGate(lambda model, lines: LineLoad(1, lines=lines), 4),
            limits=LIMITS,
            clock=lambda: self.now_s,
        )

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        file = self.batches.file(file_id)
        parts = (self.batches.part(file_id, number) for number in range(file.parts))
        data = b"".join(parts)
        assert len(data) == file.size_bytes
        return [json.loads(each) for each in data.splitlines()]

    def check(self, lines: int, refused: frozenset[int]) -> None:
        """Each line is in one of the files, once, in the order of the input."""
        document = self.batches.view(self.batch.id).document()
        assert document["status"] == "completed"
        output, errors = map(self.lines, (document["output_file_id"], document["error_file_id"]))
        of_errors = sorted(number for number in refused if number < lines)
        expected = [str(number) for number in range(lines) if number not in refused]
        assert [each["custom_id"] for each in output] == expected
        assert [each["custom_id"] for each in errors] == list(map(str, of_errors))
        for each in (*output, *errors):
            assert each["response"]["body"] == {"text": each["custom_id"]}
        counts = {"total": lines, "completed": len(output), "failed": len(errors)}
        assert document["request_counts"] == counts


LINES, REFUSED = st.integers(1, 12), st.frozensets(st.integers(0, 12), max_size=4)


@settings(max_examples=60, deadline=None)
@given(LINES, REFUSED, st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=6))
def test_each_line_is_answered_once_wherever_gateways_die(
    lines: int, refused: frozenset[int], kills: list[tuple[int, bool]]
) -> None:
    async def run(world: World) -> None:
        for uses, after in kills:
            try:
                await world.execution(uses + 1, after=after).run()
            except KilledError:
                continue
            break  # it came to its end before
        else:
            await world.execution().run()

    with TemporaryDirectory() as folder:
        world = World(Path(folder), lines, refused)
        asyncio.run(run(world))
        world.check(lines, refused)


@settings(max_examples=40, deadline=None)
@given(LINES, REFUSED, st.integers(0, 30))
def test_a_gateway_that_lost_its_lease_changes_nothing(
    lines: int, refused: frozenset[int], head_start: int
) -> None:
    """It was stopped for a while, and runs on beside the one that has taken the batch."""

    async def run(world: World) -> None:
        old = asyncio.ensure_future(world.execution().run())
        for _ in range(head_start):
            await asyncio.sleep(0)
        if old.done():
            return
        new = world.execution().run()
        results = await asyncio.gather(old, new, return_exceptions=True)
        for result in results:
            assert result is None or isinstance(result, (LeaseLostError, ApiError)), result

    with TemporaryDirectory() as folder:
        world = World(Path(folder), lines, refused)
        asyncio.run(run(world))
        world.check(lines, refused)


def test_a_gateway_that_dies_before_it_wrote_the_end_is_succeeded() -> None:
    """The progress that it kept last does not say that the batch has ended."""

    class DiesAtEnd(Gateway):
        async def run(self, tenant: str | None, work: Callable[..., Any], *args: Any) -> Any:
            if work == TenantBatches.end:
                await asyncio.sleep(2 * batch_execution.BEAT_S)  # a beat comes first
                raise KilledError
            return await super().run(tenant, work, *args)

        run_long = run

    async def run(world: World) -> None:
        with pytest.raises(KilledError):
            await world.execution(kind=DiesAtEnd).run()
        await world.execution().run()

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_execution, "BEAT_S", 0.3)
        world = World(Path(folder), 3, frozenset())
        asyncio.run(run(world))
        world.check(3, frozenset())

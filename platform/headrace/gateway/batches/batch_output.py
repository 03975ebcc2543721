"""The results of a batch's lines, and the output files that are made of them.

The output is written after every line has a result, and follows from the results, so two gateways
that write it write the same bytes. It is created, never replaced.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from headrace.gateway.batches.batch_input import BatchInput
from headrace.gateway.batches.batch_job import ANSWERED, CANCELLING, NOT_RUN, PENDING, BatchJob
from headrace.gateway.batches.batch_lines import error_line, parse_line
from headrace.gateway.batches.batch_records import LineResult, StoredBatch, StoredFile
from headrace.gateway.batches.tenant_batches import (
    PART_BYTES,
    BatchState,
    LeaseLostError,
    TenantBatches,
)

FILLED_AT_ONCE = 500
READ_BYTES = 8 << 20
"""Bytes of results that are read at once for the output."""


class BatchOutput:
    """The results and the output of one batch.

    Args:
        state: keeps them.
        tenant: the batch's tenant.
        batch: the batch.
        job: has the marks of the lines.
    """

    def __init__(
        self, state: BatchState, tenant: str | None, batch: StoredBatch, job: BatchJob
    ) -> None:
        self._state, self._tenant, self._batch, self._job = state, tenant, batch, job

    async def read_marks(self) -> int:
        """Mark the lines whose results are kept, but that the last progress does not show.

        Returns:
            The bytes of all kept results.

        Raises:
            LeaseLostError: another gateway has ended the batch.
        """
        sizes: dict[int, int] = await self._do(TenantBatches.result_sizes, self._batch)
        unknown = {
            number: size for number, size in sizes.items() if self._job.mark_of(number) == PENDING
        }
        async for results in self._results(unknown):
            for number, result in results.items():
                self._job.mark(number, result.mark)
        return sum(sizes.values())

    async def fill(self, lines: BatchInput) -> None:
        """Give each line that was not run a result that says so."""
        if self._job.is_marked:
            return
        code, what = "batch_expired", "The completion window ended"
        if self._job.status == CANCELLING:
            code, what = "batch_cancelled", "The batch was cancelled"
        missing: dict[int, LineResult] = {}
        async for number, raw in lines.lines():
            if self._job.mark_of(number) == PENDING:
                line = parse_line(raw, self._batch.endpoint)
                message = f"{what} before this line was run."
                missing[number] = LineResult(NOT_RUN, error_line(line.custom_id, code, message))
            if len(missing) >= FILLED_AT_ONCE:
                await self._fill_some(missing)
        await self._fill_some(missing)

    async def write(self, now_s: int) -> tuple[bool, bool]:
        """Write the output files in the order of the lines.

        Returns:
            Whether there is a file of answers, and one of errors.

        Raises:
            LeaseLostError: another gateway has ended the batch and removed results.
        """
        batch = self._batch
        answers = _OutputFile(self._state, self._tenant, batch.output_id)
        errors = _OutputFile(self._state, self._tenant, batch.error_id)
        sizes: dict[int, int] = await self._do(TenantBatches.result_sizes, batch)
        if len(sizes) < self._job.total:
            raise LeaseLostError
        async for results in self._results(sizes):
            for number in sorted(results):
                file = answers if results[number].mark == ANSWERED else errors
                await file.add(results[number].line)
        for file, name in ((answers, "output"), (errors, "error")):
            await file.finish(f"{batch.id}_{name}.jsonl", now_s, now_s + batch.output_ttl_s)
        return answers.size_bytes > 0, errors.size_bytes > 0

    async def _fill_some(self, missing: dict[int, LineResult]) -> None:
        marks = await self._do(TenantBatches.add_results, self._batch, missing)
        for number, mark in marks.items():
            self._job.mark(number, mark)
        missing.clear()

    async def _results(self, sizes: dict[int, int]) -> AsyncIterator[dict[int, LineResult]]:
        """Yield kept results in the order of their lines, some megabytes at a time.

        Args:
            sizes: the size of each result to read, by the line's number.
        """
        some: list[int] = []
        held = 0
        for number in sorted(sizes):
            if some and (held + sizes[number] > READ_BYTES or len(some) >= FILLED_AT_ONCE):
                yield await self._read(some)
                some, held = [], 0
            some.append(number)
            held += sizes[number]
        if some:
            yield await self._read(some)

    async def _read(self, numbers: Sequence[int]) -> dict[int, LineResult]:
        """Return kept results.

        Raises:
            LeaseLostError: one is missing, since another gateway has ended the batch.
        """
        results: dict[int, LineResult] = await self._do(TenantBatches.results, self._batch, numbers)
        if len(results) < len(numbers):
            raise LeaseLostError
        return results

    async def _do(self, work: Callable[..., Any], *args: Any) -> Any:
        return await self._state.run_long(self._tenant, work, *args)


class _OutputFile:
    """An output file that is written piece by piece.

    Attributes:
        size_bytes: bytes so far.
    """

    def __init__(self, state: BatchState, tenant: str | None, file_id: str) -> None:
        self._state, self._tenant, self._id = state, tenant, file_id
        self._rest = bytearray()
        self._parts = self.size_bytes = 0

    async def add(self, line: bytes) -> None:
        """Add a line."""
        self._rest += line
        self.size_bytes += len(line)
        while len(self._rest) >= PART_BYTES:
            await self._put(bytes(self._rest[:PART_BYTES]))
            del self._rest[:PART_BYTES]

    async def finish(self, filename: str, created_at: int, expires_at: int) -> None:
        """Write the rest, and list the file; one without lines is not kept."""
        if not self.size_bytes:
            return
        if self._rest:
            await self._put(bytes(self._rest))
        file = StoredFile(
            *(self._id, filename, "batch_output", self.size_bytes, self._parts),
            created_at=created_at,
            expires_at=expires_at,
        )
        await self._state.run_long(self._tenant, TenantBatches.add_file, file)

    async def _put(self, data: bytes) -> None:
        await self._state.run_long(
            self._tenant, TenantBatches.put_part, self._id, self._parts, data
        )
        self._parts += 1

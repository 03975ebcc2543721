"""The input file of a batch, read from the store part by part."""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace.gateway.batches.batch_lines import LineSplitter
from headrace.gateway.batches.batch_records import StoredBatch, StoredFile
from headrace.gateway.batches.tenant_batches import BatchState, TenantBatches


class BatchInput:
    """The input of one batch.

    Args:
        state: keeps it.
        tenant: the batch's tenant.
        batch: the batch.
        max_line_bytes: maximum size of a line.
    """

    def __init__(
        self, state: BatchState, tenant: str | None, batch: StoredBatch, max_line_bytes: int
    ) -> None:
        self._state, self._tenant, self._batch = state, tenant, batch
        self._max_line_bytes = max_line_bytes

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the file.

        Raises:
            ApiError: the store cannot be used now, or does not have the file.
        """
        run = self._state.run_long
        file_id = self._batch.input_file_id
        file: StoredFile = await run(self._tenant, TenantBatches.file, file_id)
        for number in range(file.parts):
            yield await run(self._tenant, TenantBatches.part, file_id, number)

    async def lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the lines, each with its number, which counts from 0.

        Raises:
            ApiError: as for `parts`.
        """
        splitter = LineSplitter(self._max_line_bytes)
        count = 0
        async for part in self.parts():
            for _, raw in splitter.feed(part):
                yield count, raw
                count += 1
        for _, raw in splitter.finish():
            yield count, raw
            count += 1

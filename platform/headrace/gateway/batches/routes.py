"""The routes of files and batches: `/v1/files...` and `/v1/batches...`, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from headrace.config.batches import BatchSettings
from headrace.config.gateway import GatewaySettings
from headrace.gateway import errors
from headrace.gateway.asgi import JSON_TYPE, ClientGone
from headrace.gateway.batches import refusals
from headrace.gateway.batches.batch_ids import BATCH, FILE, new_id, new_thread
from headrace.gateway.batches.batch_records import (
    BatchView,
    JobEntry,
    StoredBatch,
    StoredFile,
)
from headrace.gateway.batches.batch_runner import BatchRunner
from headrace.gateway.batches.tenant_batches import PART_BYTES, BatchState, TenantBatches
from headrace.gateway.batches.upload import FileForm
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.conversations.items import page
from headrace.gateway.conversations.routes import Metadata
from headrace.gateway.errors import ApiError, bad_field
from headrace.gateway.ingress import limits
from headrace.gateway.kept_records.record_cipher import GATEWAYS
from headrace.gateway.request_context import RequestContext

FILES, BATCHES = "/v1/files", "/v1/batches"
READS = ("GET", "HEAD")
MAX_LISTED_FILES = 10_000
MAX_UPLOADS = 8
"""Maximum number of files that a tenant uploads to a gateway at once."""
FORM_BYTES = 1 << 20
"""Bytes that a form may have beside its file."""
MIN_TTL_S, MAX_TTL_S = 3600, 2_592_000
"""Smallest and largest time to live that a client may ask for, as at OpenAI's service."""
CONTENT_TYPE = (b"content-type", b"application/octet-stream")

Seconds = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


class ExpiresAfter(BaseModel):
    """The time after which a file is deleted."""

    model_config = ConfigDict(extra="ignore")

    anchor: Literal["created_at"] = "created_at"
    seconds: Seconds = Field(description="Seconds from the file's creation.")


class FileUpload(BaseModel):
    """A file of requests, as a form."""

    model_config = ConfigDict(extra="ignore")

    file: bytes = Field(description="JSON lines: `custom_id`, `method`, `url` and `body` in each.")
    purpose: Literal["batch"] = Field(description="`batch`; there are no other files.")
    expires_after_seconds: Seconds | None = Field(
        default=None,
        alias="expires_after[seconds]",
        description="Seconds after which it is deleted, if before `gateway.batches.ttl_s`.",
    )


class BatchCreate(BaseModel):
    """A new batch."""

    model_config = ConfigDict(extra="ignore")

    input_file_id: Annotated[str, Field(max_length=100)] = Field(
        description="Id of a file with the purpose `batch`."
    )
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] = Field(
        description="Route of all lines."
    )
    completion_window: Literal["24h"] = Field(description="Time in which it ends: `24h`.")
    metadata: Metadata | None = Field(
        default=None, description="Up to 16 texts of the client's own, by name."
    )
    output_expires_after: ExpiresAfter | None = Field(
        default=None, description="When the output files are deleted, if before `ttl_s`."
    )


def long_bodies(settings: GatewaySettings) -> dict[str, int]:
    """Return the paths whose bodies may be longer than other requests', with the bytes they may
    have."""
    own = settings.batches
    return {FILES: own.max_file_bytes + FORM_BYTES} if own.enabled else {}


class BatchRoutes:
    """The handlers of the routes.

    Args:
        state: keeps the files and batches.
        runner: runs the batches.
        body_reader: reads bodies.
        settings: the limits.
        clock: Unix seconds.
    """

    def __init__(
        self,
        state: BatchState,
        runner: BatchRunner,
        body_reader: BodyReader,
        settings: BatchSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state, self._runner, self._body_reader = state, runner, body_reader
        self._settings, self._clock = settings, clock
        self._uploads: Counter[str | None] = Counter()

    def has(self, path: str) -> bool:
        """Return whether a path is one of these routes'."""
        return any(path == base or path.startswith(base + "/") for base in (FILES, BATCHES))

    async def handle(self, context: RequestContext) -> None:
        """Answer a request."""
        parts = context.path.split("/")[3:]
        if not all(parts) or len(parts) > 2:
            raise errors.not_found(context.path)
        if context.path.startswith(BATCHES):
            document = await self._batches(context, *parts)
        elif parts[1:] == ["content"]:
            await self._content(context, parts[0])
            return
        else:
            document = await self._files(context, *parts)
        await context.answer(200, msgspec.json.encode(document), JSON_TYPE)

    # Files.

    async def _files(self, context: RequestContext, *parts: str) -> dict[str, Any]:
        if not parts:
            context.allow_methods(*READS, "POST")
            if context.call.method == "POST":
                with self._take_upload(context.call.tenant):
                    return (await self._upload(context)).document()
            files: Sequence[StoredFile] = await self._run(context, TenantBatches.files)
            query = context.query()
            purpose = query("purpose")
            documents = [one.document() for one in files if purpose in (None, one.purpose)]
            return page(documents, query, MAX_LISTED_FILES, MAX_LISTED_FILES)
        if len(parts) > 1:
            raise errors.not_found(context.path)
        context.allow_methods(*READS, "DELETE")
        if context.call.method == "DELETE":
            await self._run(context, TenantBatches.delete_file, parts[0])
            return {"id": parts[0], "object": "file", "deleted": True}
        file: StoredFile = await self._run(context, TenantBatches.file, parts[0])
        return file.document()

    @contextlib.contextmanager
    def _take_upload(self, tenant: str | None) -> Iterator[None]:
        """Take one of a tenant's places for uploads.

        Raises:
            ApiError: 429, all are taken.
        """
        if self._uploads[tenant] >= MAX_UPLOADS:
            raise errors.too_many_requests(MAX_UPLOADS)
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            self._uploads += Counter()  # without tenants that have none

    async def _upload(self, context: RequestContext) -> StoredFile:
        """Keep a file; its content goes to the store as it arrives."""
        form = FileForm(context.headers.get(b"content-type", b""), PART_BYTES)
        limits.check_encoding(context.call.encodings)
        has_bytes: int = await self._run(context, TenantBatches.size_bytes)
        file_id, written = new_id(FILE), 0
        reservation = context.call.reservation = self._body_reader.reserve(context.call.tenant)
        reservation.add(2 * PART_BYTES)
        try:
            async for piece in _pieces(context):
                parts = form.feed(piece) if piece else form.finish()
                self._check_size(form.size_bytes, has_bytes)
                for part in parts:
                    await self._run(context, TenantBatches.put_part, file_id, written, part)
                    written += 1
            if form.fields.get("purpose") != "batch":
                raise bad_field("purpose", "must be batch; there are no other files")
            now_s = int(self._clock())
            file = StoredFile(
                *(file_id, form.filename or "", "batch", form.size_bytes, written),
                created_at=now_s,
                expires_at=now_s + self._ttl_s(form),
            )
            maximum = self._settings.max_tenant_bytes
            await self._run(context, TenantBatches.add_file, file, maximum)
        except BaseException:
            if written:
                removed = self._run(context, TenantBatches.remove_parts, file_id, written)
                self._removing = asyncio.ensure_future(removed)
                self._removing.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise
        return file

    def _check_size(self, size_bytes: int, has_bytes: int) -> None:
        if size_bytes > self._settings.max_file_bytes:
            raise refusals.file_too_large(self._settings.max_file_bytes)
        maximum = self._settings.max_tenant_bytes
        if has_bytes + size_bytes > maximum:
            raise refusals.no_room(has_bytes, size_bytes, maximum)

    def _ttl_s(self, form: FileForm) -> int:
        given = form.fields.get("expires_after[seconds]")
        if given is None:
            return int(self._settings.ttl_s)
        if not (given.isdigit() and MIN_TTL_S <= int(given[:9]) <= MAX_TTL_S):
            raise bad_field("expires_after", f"[seconds] must be from {MIN_TTL_S} to {MAX_TTL_S}")
        return min(int(given), int(self._settings.ttl_s))

    async def _content(self, context: RequestContext, file_id: str) -> None:
        """Answer with the content of a file, at the client's pace."""
        context.allow_methods(*READS)
        file: StoredFile = await self._run(context, TenantBatches.file, file_id)
        call = context.call
        headers = [
            CONTENT_TYPE,
            (b"x-request-id", call.request_id),
            (b"content-length", b"%d" % file.size_bytes),
        ]
        call.reservation = self._body_reader.reserve(call.tenant)
        call.reservation.add(2 * PART_BYTES)
        first = await self._run(context, TenantBatches.part, file_id, 0) if file.parts else b""
        await context.send({"type": "http.response.start", "status": 200, "headers": headers})
        call.status = 200
        for number in range(max(1, file.parts)):
            part = first
            if number:
                part = await self._run(context, TenantBatches.part, file_id, number)
            more = number + 1 < file.parts
            await context.send({"type": "http.response.body", "body": part, "more_body": more})
            call.sent_bytes += len(part)

    # Batches.

    async def _batches(self, context: RequestContext, *parts: str) -> dict[str, Any]:
        if not parts:
            context.allow_methods(*READS, "POST")
            if context.call.method == "POST":
                return await self._create(context)
            return await self._list(context)
        if parts[1:] == ("cancel",):
            context.allow_methods("POST")
            cancelled: BatchView = await self._run(context, TenantBatches.cancel, parts[0])
            return cancelled.document()
        if len(parts) > 1:
            raise errors.not_found(context.path)
        context.allow_methods(*READS)
        view: BatchView = await self._run(context, TenantBatches.view, parts[0])
        return view.document()

    async def _create(self, context: RequestContext) -> dict[str, Any]:
        wanted = limits.validated(BatchCreate, await self._body_reader.json(context))
        settings, caller = self._settings, context.caller
        output_ttl_s = int(settings.ttl_s)
        if wanted.output_expires_after is not None:
            output_ttl_s = min(output_ttl_s, wanted.output_expires_after.seconds)
        batch = StoredBatch(
            id=new_id(BATCH),
            input_file_id=wanted.input_file_id,
            endpoint=wanted.endpoint,
            metadata=msgspec.json.encode(wanted.metadata),
            created_at=int(self._clock()),
            output_id=new_id(FILE),
            error_id=new_id(FILE),
            lines_thread=new_thread(),
            output_ttl_s=output_ttl_s,
        )
        create = TenantBatches.create_batch
        made: BatchView = await self._run(
            *(context, create, batch, settings.max_unfinished),
            *(settings.max_tenant_bytes, settings.ttl_s),
        )
        entry = JobEntry(batch.id, context.call.tenant, caller.key_hash)
        await self._state.run(GATEWAYS, TenantBatches.add_job, entry)
        self._runner.wake()
        return made.document()

    async def _list(self, context: RequestContext) -> dict[str, Any]:
        batches: Sequence[StoredBatch] = await self._run(context, TenantBatches.batches)
        listed = page([{"id": batch.id} for batch in batches], context.query())
        views = await asyncio.gather(*(self._view(context, one["id"]) for one in listed["data"]))
        return {**listed, "data": [view.document() for view in views if view is not None]}

    async def _view(self, context: RequestContext, batch_id: str) -> BatchView | None:
        """Return a batch; None, and remove it from the list, if it expired."""
        try:
            view: BatchView = await self._run(context, TenantBatches.view, batch_id)
            return view
        except ApiError as error:
            if error.code != "batch_not_found":
                raise
        await self._run(context, TenantBatches.remove_from_index, batch_id)
        return None

    async def _run(self, context: RequestContext, work: Callable[..., Any], *args: Any) -> Any:
        return await self._state.run(context.call.tenant, work, *args)


async def _pieces(context: RequestContext) -> Any:
    """Yield the pieces of a request's body, and an empty one at its end.

    Raises:
        ClientGone: the client hung up first.
    """
    more = True
    while more:
        message = await context.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece, more = message.get("body", b""), message.get("more_body", False)
        if piece:
            yield piece
    yield b""

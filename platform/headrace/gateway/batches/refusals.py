"""The refusals of requests about files and batches, in OpenAI's shape."""

from __future__ import annotations

from headrace.gateway.errors import ApiError


def file_not_found(file_id: str, param: str = "file_id") -> ApiError:
    """404: no such file, or another tenant's."""
    return ApiError(
        404, f"No such File object: {file_id[:100]}", code="file_not_found", param=param
    )


def batch_not_found(batch_id: str) -> ApiError:
    """404: no such batch, or another tenant's."""
    return ApiError(
        404, f"No batch found with id '{batch_id[:100]}'.", code="batch_not_found", param="batch_id"
    )


def file_in_use(file_id: str, batch_id: str) -> ApiError:
    """409: an unfinished batch reads the file."""
    return ApiError(
        409,
        f"File '{file_id}' is the input of the unfinished batch '{batch_id}'. Cancel the batch, or "
        "wait until it has ended.",
        code="file_in_use",
        param="file_id",
    )


def wrong_purpose(file_id: str, purpose: str) -> ApiError:
    """400: the input of a batch is no file for batches."""
    return ApiError(
        400,
        f"File '{file_id}' has the purpose '{purpose}'; a batch needs the purpose 'batch'.",
        code="invalid_value",
        param="input_file_id",
    )


def no_room(has: int, more: int, maximum: int) -> ApiError:
    """413: the tenant's files would have too many bytes."""
    return ApiError(
        413,
        f"The files of this tenant have {has} bytes, and this one at least {more} more; "
        f"{maximum} is the limit (gateway.batches.max_tenant_bytes). Delete files.",
        code="storage_full",
        param="file",
    )


def file_too_large(limit_bytes: int) -> ApiError:
    """413: the file alone is too large."""
    return ApiError(
        413,
        f"The file is larger than {limit_bytes} bytes (gateway.batches.max_file_bytes). "
        "Divide it into several batches.",
        code="file_too_large",
        param="file",
    )


def bad_upload(what: str, param: str | None = None) -> ApiError:
    """400: the body is no form with a file."""
    return ApiError(400, what, code="invalid_form", param=param)


def too_many_batches(limit: int) -> ApiError:
    """429: the tenant has its maximum number of unfinished batches."""
    return ApiError(
        429,
        f"{limit} batches of this tenant are unfinished, which is the limit. Wait until one has "
        "ended, or cancel one.",
        code="too_many_batches",
        headers=[(b"retry-after", b"60")],
    )


def batch_ended(batch_id: str, status: str) -> ApiError:
    """409: a batch is cancelled that has ended."""
    return ApiError(
        409,
        f"Batch '{batch_id}' is {status}, so that it cannot be cancelled.",
        code="batch_ended",
        param="batch_id",
    )


def unavailable() -> ApiError:
    """503: the store of files and batches cannot be used now."""
    return ApiError(
        503,
        "The store of files and batches cannot be used now. Try again.",
        code="batches_unavailable",
        headers=[(b"retry-after", b"1")],
    )


def thread_full() -> ApiError:
    """413: the store has no room for more."""
    return ApiError(413, "The store has no room for this.", code="storage_full")


def damaged(thread: str, name: str) -> ApiError:
    """500: a record does not open, so nothing is made of it."""
    return ApiError(
        500,
        f"The kept record {thread}/{name} is damaged and is not used.",
        code="batches_damaged",
    )

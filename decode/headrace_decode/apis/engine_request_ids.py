"""Names that vLLM's application gives to one request."""

from __future__ import annotations

from headrace_decode.apis.messages import ID


def engine_names(request_id: str) -> tuple[str, ...]:
    """Return the names under which the engine may know a request.

    Args:
        request_id: the id that the client sent or was given. vLLM prepends the kind of answer, and
            appends the number of the prompt in its list.
    """
    return (
        request_id,
        f"chatcmpl-{request_id.removeprefix(ID)}",
        f"cmpl-{request_id}-0",
        f"{request_id}_0",  # name in `/v1/responses`
    )

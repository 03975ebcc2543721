"""vLLM's environment variables that would change how a replica's HTTP port answers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger("headrace.decode")

RESPONSES_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
"""vLLM's switch for keeping answers of `/v1/responses`. It is always off here: vLLM would keep all
answers without a limit, readable by any client that knows an id, and only in the memory of one
replica. Without it vLLM ignores `store` and refuses `background` and any `previous_response_id`."""
API_KEY = "VLLM_API_KEY"
"""vLLM's switch for its own API key, which requests from a gateway do not carry."""


def without_responses_store() -> None:
    """Switch vLLM's store of answers off for this process."""
    if os.environ.get(RESPONSES_STORE, "0") != "0":
        logger.warning("%s is ignored: answers are not kept", RESPONSES_STORE)
    os.environ[RESPONSES_STORE] = "0"


def refuse_api_key(environment: Mapping[str, str]) -> None:
    """Refuse an environment in which vLLM asks for a key that gateways do not pass on.

    Raises:
        ValueError: such a key is set.
    """
    if environment.get(API_KEY):
        raise ValueError(
            f"{API_KEY} has no effect: the gateway checks keys; unset it and set "
            "headrace.gateway.api_keys or api_keys_file"
        )

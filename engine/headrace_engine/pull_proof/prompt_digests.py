"""Digests of all that a prompt's KV depends on in one engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from headrace_engine.connector.identity.adapters import AdapterIdentities
from headrace_engine.connector.identity.engine_identity import (
    adapter_settings,
    first_epoch,
    kv_identity,
    new_epoch,
)
from headrace_engine.connector.identity.weights import Unidentified
from headrace_engine.kv_transfer.media import media_digest
from headrace_engine.pull_proof.identity import prompt_digest
from headrace_engine.vllm.kv_cache import identifies_media

logger = logging.getLogger("headrace.engine")


class PromptDigests:
    """Maker of the digests of one engine.

    Args:
        vllm_config: of the engine.

    Attributes:
        is_known: whether the engine's KV has an identity. Without one there are no digests.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._identity, self._epoch = b"", first_epoch(vllm_config)
        try:
            self._identity = kv_identity(vllm_config).encoding
        except Unidentified as error:
            logger.warning("this engine neither pulls KV nor hands it out: %s", error)
        self.is_known = bool(self._identity)
        self._epochs = [self._epoch.hex()] if self._epoch else []
        self._identifies_media = identifies_media(vllm_config)
        self._adapters: AdapterIdentities | None = None
        if vllm_config.lora_config is not None:
            self._adapters = AdapterIdentities(adapter_settings(vllm_config))

    def of(self, request: Any, token_ids: Sequence[int]) -> bytes | None:
        """Return the digest of a request's first tokens; None if something that their KV depends on
        is not known."""
        adapter: bytes | None = b""
        if request.lora_request is not None:
            known = self._adapters
            adapter = None if known is None else known.of(request.lora_request)
        media = media_digest(request.mm_features or (), len(token_ids))
        if not self.is_known or adapter is None or (media and not self._identifies_media):
            return None
        engine = self._identity + self._epoch
        return prompt_digest(engine, request.cache_salt or "", adapter, token_ids, media)

    def renew(self) -> None:
        """Make digests from now on that no engine has made: the weights may have changed."""
        self._epoch = new_epoch()
        self._epochs = [self._epoch.hex()]

    def take_epochs(self) -> list[str]:
        """Return the epoch that has begun since the last call, in hex, if there is one."""
        told, self._epochs = self._epochs, []
        return told

    def close(self) -> None:
        """Stop checking the files of adapters."""
        if self._adapters is not None:
            self._adapters.close()

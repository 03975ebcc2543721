"""The list of models that a key may use: what their replicas tell of them, and the aliases.

vLLM's own list is of one replica. A model without a ready replica is listed by its name, and its
adapters by theirs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

import msgspec

from headrace.gateway.errors import ApiError
from headrace.gateway.models.model_table import ModelTable
from headrace.gateway.models.served_model import ServedModel
from headrace.gateway.relay.call import Call
from headrace.gateway.relay.headers import forwarded

logger = logging.getLogger("headrace.gateway")

LIST_TIMEOUT_S = 2.0
"""Time limit for a replica's list."""
Card = dict[str, Any]


class ModelList:
    """The list of a gateway's models.

    Args:
        models: the models.
        path: the route of replicas' own lists.
    """

    def __init__(self, models: ModelTable, path: str) -> None:
        self._models, self._path = models, path
        self._created = int(time.time())

    async def cards(self, call: Call, allowed: Collection[str] | None) -> list[Card]:
        """Return the descriptions of the models, adapters and aliases that a key may use.

        Args:
            call: the client's request.
            allowed: the names to which the key is limited; None for all.
        """
        names = self._models.names
        told = await asyncio.gather(*(self._told(model, call) for model in self._models))
        cards = [card for cards in told for card in cards]
        cards += [self._card(alias) for alias in names.aliases]
        if allowed is None:
            return cards
        return [card for card in cards if card["id"] in allowed or card.get("parent") in allowed]

    async def _told(self, model: ServedModel, call: Call) -> list[Card]:
        """Return what a replica tells of a model and its adapters, or their names."""
        pool = model.pool
        if pool.ready_now or pool.fallbacks_ready:
            question = Call(call.request_id, "GET", self._path, forwarded([], call.request_id))
            question.tenant = call.tenant
            try:
                async with asyncio.timeout(LIST_TIMEOUT_S):
                    answer = await model.fetcher.fetch(question)
                answer.close()
                if answer.reply.status == 200 and (cards := listed_cards(answer.body)):
                    return cards
            except (TimeoutError, ApiError) as error:
                logger.debug("no list of models from a replica of %s: %r", model.model_id, error)
        base, names = model.model_id, self._models.names.adapters
        if base in names.models:
            await self._models.added.read()
        adapters = [{**self._card(name), "parent": base} for name in names.named(base)]
        return [self._card(base), *adapters]

    def _card(self, name: str) -> Card:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "headrace"}


def listed_cards(listing: bytes) -> list[Card]:
    """Return the descriptions in a replica's list of models; empty if it is no such list."""
    try:
        cards = msgspec.json.decode(listing)["data"]
        return [dict(card) for card in cards if isinstance(card["id"], str)]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []

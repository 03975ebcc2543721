"""`/headrace/v1/corpora`: operator corpora in the retrieval memories of all decode replicas.

A client sends a corpus in one request or in numbered parts, so that no body is long and every
answer shows the progress. Each part goes to all replicas. After the last part, the replicas that
have all parts switch to the new version, and one of them informs replicas that start later. The
gateway keeps no state between parts: the client sends the version with each part after the first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.gateway.backend import ModelBackend
from headrace.gateway.errors import ApiError, bad_field
from headrace.gateway.ingress.limits import validated, wrong_field
from headrace_kvstore.identity.salts import tenant_salt

CORPORA = "/headrace/v1/corpora"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

Answers = list[dict[str, Any]]
Short = Annotated[str, Field(max_length=256)]
Count = Annotated[int, Field(ge=0, lt=2**32)]


class CorpusPart(BaseModel):
    """A corpus, or with `part` and `more` a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: list[Annotated[str, Field(min_length=1)]] = Field(
        description="Documents; at least one in the first part."
    )
    tenant: Short | None = Field(
        default=None, description="Cache salt of the tenant that it is for; null for all."
    )
    ttl_s: float | None = Field(
        default=None, gt=0, description="Seconds for which it is kept; null for ever."
    )
    version: Count | None = Field(
        default=None, description="Left out in part 0; after that, the version in part 0's answer."
    )
    part: Count = Field(default=0, description="Counts from 0.")
    more: bool = Field(
        default=False, description="Whether parts follow. After the last one it is in force."
    )
    total_chars: Count = Field(default=0, description="Of all parts; 0 if unknown.")

    @model_validator(mode="after")
    def _first_or_not(self) -> CorpusPart:
        if self.part == 0 and not self.texts:
            raise wrong_field("texts", "must not be empty in the first part")
        if (self.part == 0) != (self.version is None):
            raise wrong_field(
                "version", "must be left out in part 0, and then be the version in part 0's answer"
            )
        return self


class CorpusAdmin:
    """The operations on corpora.

    Args:
        backends: the replicas of each model. A corpus is for all of them.
        keys_on: whether API keys prove tenants; otherwise a tenant is a cache salt.
    """

    def __init__(
        self,
        backends: Sequence[ModelBackend],
        *,
        keys_on: bool = False,
    ) -> None:
        self._backends, self._keys_on = tuple(backends), keys_on
        self._newest = 0

    async def listing(self) -> dict[str, Any]:
        """Return the corpora of each replica.

        Raises:
            ApiError: 409, no replica drafts from a memory, or each of them refuses.
        """
        return {"replicas": _flat(await self._ask_all({"do": "list"}))}

    async def load(self, corpus: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Load a part, and switch to the new version after the last part.

        Raises:
            ApiError: 400 the request is wrong, 409 as `listing`.
        """
        _check_name(corpus)
        part = validated(CorpusPart, wanted)
        version = part.version or self._next_version()
        names = {"corpus": corpus, "tenant": self._salt(part.tenant), "version": version}
        more = {"part": part.part, "texts": part.texts, "ttl_s": part.ttl_s}
        by_model = await self._ask_all(
            {"do": "part", **names, **more, "total_chars": part.total_chars}
        )
        answers = _flat(by_model)
        if not part.more:
            missed = [answer for answer in answers if "error" in answer]
            tellers = [_teller(of_model) for of_model in by_model]
            flipped = _flat(
                await self._ask(
                    [
                        None if teller is None else {"do": "flip", **names, "teller": teller}
                        for teller in tellers
                    ]
                )
            )
            known = {answer.get("replica_id") for answer in missed}
            answers = [*missed, *(each for each in flipped if each["replica_id"] not in known)]
        echoed = {**names, "tenant": part.tenant}
        return {**echoed, "in_force": not part.more, "replicas": answers}

    async def drop(self, corpus: str, tenant: str | None) -> dict[str, Any]:
        """Drop a corpus from all replicas, so that they no longer draft from it.

        Raises:
            ApiError: 400 the name is invalid, 404 no replica has it, 409 as `listing`.
        """
        _check_name(corpus)
        command = {"do": "drop", "corpus": corpus, "tenant": self._salt(tenant)}
        answers = _flat(await self._ask_all({**command, "version": self._next_version()}))
        if not any(answer.get("dropped") for answer in answers):
            whose = "all tenants" if tenant is None else "this tenant"
            raise ApiError(
                404,
                f"There is no corpus '{corpus}' for {whose}.",
                code="corpus_not_found",
                param="corpus",
            )
        return {"corpus": corpus, "tenant": tenant, "replicas": answers}

    def _salt(self, tenant: str | None) -> str | None:
        """Return the salt of the tenant's requests that send none themselves."""
        if tenant is None or not self._keys_on:
            return tenant
        try:
            return tenant_salt(tenant)
        except ValueError as error:
            raise bad_field("tenant", str(error)) from None

    async def _ask_all(self, command: dict[str, Any]) -> list[Answers]:
        """Run `_ask` with one command for all models."""
        return await self._ask([command] * len(self._backends))

    async def _ask(self, commands: Sequence[dict[str, Any] | None]) -> list[Answers]:
        """Return, by model, the answers of the replicas that draft from a memory.

        Args:
            commands: the command to each model's replicas; None for none.

        Raises:
            ApiError: 409 there is no such replica, or each of them refuses.
        """
        by_model = [
            [] if command is None else await backend.send_corpus_command(command)
            for backend, command in zip(self._backends, commands, strict=True)
        ]
        answers = _flat(by_model)
        if not answers:
            raise ApiError(
                409,
                "No replica drafts from a memory: set speculation.enabled: true.",
                code="no_memory",
            )
        if all("error" in answer for answer in answers):
            raise ApiError(409, _sentence(answers[0]["error"]), code="memory_refuses")
        return by_model

    def _next_version(self) -> int:
        """Return a version above all earlier versions: seconds since 1970.

        Versions of other gateways are lower as far as the machines' clocks agree.
        """
        self._newest = max(int(time.time()), self._newest + 1)
        return self._newest


def _flat(by_model: Sequence[Answers]) -> Answers:
    return [answer for answers in by_model for answer in answers]


def _teller(answers: Answers) -> str | None:
    """Return the replica that informs those of its model that start later."""
    return min((answer["replica_id"] for answer in answers if "error" not in answer), default=None)


def _check_name(corpus: str) -> None:
    if not NAME.fullmatch(corpus):
        raise bad_field(
            "corpus",
            'must be 1 to 64 letters, digits, ".", "_" and "-", a letter or digit first',
        )


def tenant_of(target: str) -> str | None:
    """Return the tenant that a request's query names, or None.

    Raises:
        ApiError: 400, the query has another field.
    """
    query = parse_qsl(target.partition("?")[2], keep_blank_values=True)
    if any(name != "tenant" for name, _ in query) or len(query) > 1:
        raise bad_field("query", "may have one tenant and nothing else")
    return query[0][1] if query else None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")

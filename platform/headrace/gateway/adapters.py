"""vLLM's routes to load and unload LoRA adapters, for all replicas of the app.

`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` take vLLM's bodies. The adapters are kept with
the cluster, so replicas that start later have them, too. Adapters of the configuration stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.gateway.backend import ModelBackend
from headrace.gateway.errors import ApiError, bad_field
from headrace.gateway.ingress.limits import validated
from headrace_engine.adapters.settings import MAX_NAME_CHARS, normal_source, why_bad_name

LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"

AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapter(BaseModel):
    """A LoRA adapter to load."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: AdapterName = Field(description="The name that requests give as `model`.")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="A folder on every node, a URI (`s3://`, `gs://`, `abfss://`, `hf://`), or a "
        "repository of the Hugging Face hub."
    )
    load_inplace: bool = Field(
        default=False, description="Replace the adapter that administrators added by this name."
    )


class UnloadAdapter(BaseModel):
    """A LoRA adapter to unload."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: AdapterName


class AdapterAdmin:
    """The operations on LoRA adapters.

    Args:
        backend: the base model's replicas.
        model_id: the base model's name.
    """

    def __init__(self, backend: ModelBackend, model_id: str) -> None:
        self._backend, self._model_id = backend, model_id

    async def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Load an adapter at all replicas; return the answer of each.

        Raises:
            ApiError: 400, the request is wrong or no replica can use the adapter; 503, some
                replicas cannot use it yet.
        """
        request = validated(LoadAdapter, wanted)
        name = request.lora_name
        if why := why_bad_name(name, self._model_id):
            raise bad_field("lora_name", why)
        earlier = (await self._backend.added_adapters()).get(name)
        if earlier is not None and not request.load_inplace:
            raise bad_field("lora_name", f"{name!r} is loaded; set load_inplace to replace it")
        answers = await self._backend.set_adapter(name, normal_source(request.lora_path))
        failed = [answer for answer in answers if "error" in answer]
        if failed and len(failed) == len(answers):
            await self._backend.set_adapter(name, earlier)
            raise bad_field("lora_path", f"the adapter cannot be used: {failed[0]['error']}")
        if failed:
            raise ApiError(
                503,
                f"{len(answers) - len(failed)} of {len(answers)} replicas have loaded '{name}'; "
                + "; ".join(f"{each['replica_id']}: {each['error']}" for each in failed),
                kind="server_error",
                code="adapter_incomplete",
                param="lora_path",
            )
        return {"lora_name": name, "replicas": answers}

    async def unload(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Unload an adapter that administrators added; return the answer of each replica.

        Requests that run keep it.

        Raises:
            ApiError: 400, the request is wrong; 404, there is no such adapter.
        """
        name = validated(UnloadAdapter, wanted).lora_name
        if name not in await self._backend.added_adapters():
            raise ApiError(
                404,
                f"No adapter '{name[:200]}' was added by an administrator.",
                code="model_not_found",
                param="lora_name",
            )
        return {"lora_name": name, "replicas": await self._backend.set_adapter(name, None)}

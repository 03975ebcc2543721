"""vLLM's routes to load and unload LoRA adapters, for all replicas of a model.

`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` take vLLM's bodies. In an app with several
models, `model` names the base model. The adapters are kept with the cluster, so replicas that start
later have them, too. Adapters of the configuration stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.gateway.errors import ApiError, bad_field, model_not_found
from headrace.gateway.ingress.limits import validated
from headrace.gateway.models.model_names import ModelNames
from headrace.gateway.models.served_model import ModelSource
from headrace_engine.adapters.settings import MAX_NAME_CHARS, normal_source, why_bad_name

LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"

AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
BASE = Field(
    default=None, description="Name of the base model; may be left out if one model has adapters."
)


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
    model: str | None = BASE


class UnloadAdapter(BaseModel):
    """A LoRA adapter to unload."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: AdapterName
    model: str | None = BASE


class AdapterAdmin:
    """The operations on LoRA adapters.

    Args:
        models: the models.
        names: their names, and those of their adapters; changed with the adapters.
    """

    def __init__(self, models: Sequence[ModelSource], names: ModelNames) -> None:
        self._backends = {one.model_id: one.backend for one in models if one.adapters is not None}
        self._names = names

    def _base(self, model: str | None) -> str:
        """Return the base model that a request means.

        Raises:
            ApiError: 400 no model is named, or it has no adapters; 404 there is no such model.
        """
        backends = self._backends
        if model is None:
            if len(backends) > 1:
                raise bad_field("model", f"must be the base model: {' or '.join(backends)}")
            return next(iter(backends))
        if model not in self._names.models:
            raise model_not_found(model)
        if model not in backends:
            raise bad_field(
                "model",
                f"{model!r} has no LoRA layers; set engine.enable_lora in both of its roles",
            )
        return model

    async def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Load an adapter at all replicas of its base model; return the answer of each.

        Raises:
            ApiError: 400, the request is wrong or no replica can use the adapter; 404, there is no
                such base model; 503, some replicas cannot use the adapter yet.
        """
        request = validated(LoadAdapter, wanted)
        name = request.lora_name
        model_id = self._base(request.model)
        if why := why_bad_name(name, model_id):
            raise bad_field("lora_name", why)
        added = {each: await self._added(each) for each in self._backends}
        if why := self._names.why_not_adapter(name, model_id):
            raise bad_field("lora_name", why)
        earlier = added[model_id].get(name)
        if earlier is not None and not request.load_inplace:
            raise bad_field("lora_name", f"{name!r} is loaded; set load_inplace to replace it")
        answers = await self._set(model_id, name, normal_source(request.lora_path))
        failed = [answer for answer in answers if "error" in answer]
        if failed and len(failed) == len(answers):
            await self._set(model_id, name, earlier)
            raise bad_field("lora_path", f"the adapter cannot be used: {failed[0]['error']}")
        if failed:
            raise ApiError(
                503,
                f"{len(answers) - len(failed)} of {len(answers)} replicas have loaded '{name}'; "
                + "; ".join(f"{each['replica_id']}: {each['error']}" for each in failed),
                code="adapter_incomplete",
                param="lora_path",
            )
        return {"lora_name": name, "replicas": answers}

    async def unload(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Unload an adapter that administrators added; return the answer of each replica.

        Requests that run keep it.

        Raises:
            ApiError: 400, the request is wrong; 404, there is no such base model or adapter.
        """
        request = validated(UnloadAdapter, wanted)
        name, model_id = request.lora_name, self._base(request.model)
        if name not in await self._added(model_id):
            raise ApiError(
                404,
                f"No adapter '{name[:200]}' was added by an administrator.",
                code="model_not_found",
                param="lora_name",
            )
        return {"lora_name": name, "replicas": await self._set(model_id, name, None)}

    async def _added(self, model_id: str) -> dict[str, str]:
        """Return the sources of a model's added adapters, by name, as the cluster has them now."""
        sources = await self._backends[model_id].added_adapters()
        self._names.adapters.set_added(model_id, sources)
        return sources

    async def _set(self, model_id: str, name: str, source: str | None) -> list[dict[str, Any]]:
        """Add or remove (None) an adapter of a model; return the answer of each replica."""
        answers = await self._backends[model_id].set_adapter(name, source)
        await self._added(model_id)
        return answers

"""The section `store`: what engines keep of their KV, and where."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from headrace.config.section import GIB, Section


class StoreSection(Section):
    """The KV store that all engines of a node share."""

    enabled: bool = Field(
        default=True,
        description="Whether engines keep KV outside of their own caches. Applies where "
        "`engine.kv_transfer_config` names NixlConnector, as it does unless you change it.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,200}$",
        description="Name of the shared memory, below /dev/shm on each node. null: one of its "
        "own for each start. `headrace down` removes it.",
    )
    dram_gb: float = Field(
        default=1.0,
        gt=0,
        description="GiB of shared memory on each node that runs engines, tables included.",
    )
    nvme_folder: str | None = Field(
        default=None,
        min_length=1,
        description="Absolute folder on a local disk for KV that outlives DRAM and restarts; the "
        "same path on every node, used by one store at a time. null: no NVMe tier.",
    )
    nvme_gb: float = Field(
        default=16.0, gt=0, description="GiB that the files in `nvme_folder` may take, per node."
    )
    object_url: str | None = Field(
        default=None,
        description="Below the disk: where blocks that were used again go, and come from on every "
        "machine, such as `s3://BUCKET/PREFIX`, `gs://`, `az://` or `file:///FOLDER`. Needs the "
        "extra `headrace[object]`. Whoever can write there is trusted. null: no object store.",
    )
    object_gb: float = Field(
        default=64.0, gt=0, description="GiB that this app's objects may take there."
    )
    object_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Of the object store's client (`endpoint`, `region`, `access_key_id`, ...), "
        "before the environment; `headrace config show` masks the values.",
    )
    share: bool = Field(
        default=True,
        description="Whether the machines of a cluster lend each other the blocks that they hold. "
        "Each then listens on free ports of its Ray address: whoever reaches these, or UCX's own, "
        "can read KV, so they belong behind a firewall. A machine that is alone opens none.",
    )
    system_prompts: list[str] = Field(
        default_factory=list,
        description="System messages whose KV is made when a decode replica starts, and pinned.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="More settings of the engines' side, by the names of docs/kvstore.md "
        "(`lease_s`, `copy_threads`, `depth`, ...).",
    )
    node: dict[str, Any] = Field(
        default_factory=dict,
        description="More settings of each node's StoreNode, by the names of docs/kvstore.md "
        "(`events`, `warm`, `heal_s`, ...).",
    )

    @field_validator("nvme_folder")
    @classmethod
    def _folder_is_absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f'must be an absolute path, got "{value}"')
        return value

    @field_validator("object_url")
    @classmethod
    def _is_an_object_url(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"[a-z0-9]+://.", value):
            raise ValueError(
                f'must be like "s3://BUCKET/PREFIX" or "file:///FOLDER", got "{value}"'
            )
        return value

    @model_validator(mode="after")
    def _both_sides_take_their_settings(self) -> Self:
        self.engine_settings("check")
        self.node_settings("check")
        return self

    def engine_settings(self, name: str) -> dict[str, Any]:
        """`HeadraceConnector`'s settings, for an arena of that name.

        Raises:
            ValueError: a setting is unknown or impossible; the text begins with its path.
        """
        from headrace_kvstore.connector.store_settings import StoreSettings

        return self._settings("engine", StoreSettings.parse, name, {"dram_bytes": self._dram_bytes})

    def node_settings(self, name: str) -> dict[str, Any]:
        """`StoreNode`'s settings, for an arena of that name.

        Raises:
            ValueError: as `engine_settings`.
        """
        from headrace_kvstore.node_settings import NodeSettings

        own: dict[str, Any] = {"dram_bytes": self._dram_bytes}
        if self.nvme_folder is not None:
            own |= {"nvme_folder": self.nvme_folder, "nvme_bytes": int(self.nvme_gb * GIB)}
        if self.object_url is not None:
            own |= {"object_url": self.object_url, "object_bytes": int(self.object_gb * GIB)}
            own |= {"object_options": self.object_options}
        return self._settings("node", NodeSettings.parse, name, own)

    @property
    def _dram_bytes(self) -> int:
        return int(self.dram_gb * GIB)

    def _settings(
        self, field: str, parse: Callable[[Mapping[str, Any]], object], name: str, own: Any
    ) -> dict[str, Any]:
        given: dict[str, Any] = getattr(self, field)
        decided = {"name": "name", "dram_bytes": "dram_gb"}
        decided |= {"nvme_folder": "nvme_folder", "nvme_bytes": "nvme_gb"}
        decided |= {"object_url": "object_url", "object_bytes": "object_gb"}
        decided |= {"object_options": "object_options"}
        for key in decided.keys() & given:
            raise ValueError(f"{field}.{key}: set store.{decided[key]} instead")
        settings = {"name": self.name or name, **own, **given}
        try:
            parse(settings)
        except ValueError as error:
            text = str(error).removeprefix("kv_connector_extra_config.")
            raise ValueError(f"{field}.{text}") from None
        return settings

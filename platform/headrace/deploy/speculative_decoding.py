"""Speculative decoding in the decode engine's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from headrace.config.speculation import SpeculationSection
from headrace_kvstore.lookup.store_view import store_settings

if TYPE_CHECKING:
    from headrace_decode.speculative.tenant_policies import Tenants


def add_speculative_decoding(section: SpeculationSection, engine: dict[str, Any]) -> bool:
    """Switch on speculative decoding in an engine. Return whether it is Headrace's.

    Args:
        section: the configuration's section.
        engine: `engine_kwargs` of the decode role, with the store in it if there is one: replicas
            share their memories through its nodes. Changed in place.
    """
    if not section.enabled or why_no_speculation(engine) is not None:
        return False
    from headrace_decode.speculative.settings import engine_arguments

    wanted = engine_arguments(
        section.draft_tokens,
        mode=section.mode,
        drafter_options=section.drafter_options,
        corpora=section.corpora,
        replication=_replication_settings(engine) if section.share else None,
    )
    additional = {**engine.get("additional_config", {}), **wanted.pop("additional_config")}
    engine |= {**wanted, "additional_config": additional}
    return True


def why_no_speculation(engine: Mapping[str, Any]) -> str | None:
    """Return why an engine with these `engine_kwargs` does not draft with Headrace's drafter; None
    if it can."""
    if engine.get("speculative_config") is None:
        return None
    return "the engine has a speculative_config of its own, and drafts by it"


def tenants_of(section: SpeculationSection) -> Tenants:
    """Return the policies that the configuration sets for tenants."""
    from headrace_decode.speculative.tenant_policies import TenantPolicy, Tenants

    return Tenants({s: TenantPolicy(**t.model_dump()) for s, t in section.tenants.items()})


def _replication_settings(engine: dict[str, Any]) -> dict[str, Any] | None:
    transfer = engine.get("kv_transfer_config")
    if not isinstance(transfer, dict):
        return None
    fields = {"kv_connector": None, "kv_connector_extra_config": None, **transfer}
    store = store_settings(SimpleNamespace(**fields))
    if store is None:
        return None
    folder = store.socket_folder
    return {"store": store.name, **({} if folder is None else {"socket_folder": str(folder)})}

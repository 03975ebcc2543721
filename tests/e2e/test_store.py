"""The KV store as clients and operators meet it: what one engine computed, the other loads."""

from __future__ import annotations

import os
import signal
import uuid
from typing import Any

import pytest

from headrace_kvstore.arena.arena import Arena
from tests.support.app import App, until
from tests.support.prompts import noise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 128
BLOCKS = 3
"""Full ones of a prompt."""


def ask(app: App, prompt: list[int], salt: str) -> tuple[list[int], dict[str, Any]]:
    """Token ids of the answer, and the plan."""
    name = uuid.uuid4().hex
    body = app.complete(
        prompt, headers={"X-Request-Id": name}, cache_salt=salt, return_token_ids=True
    )
    return body["choices"][0]["token_ids"], app.plan(name)


def store(app: App) -> dict[str, Any]:
    """This machine's StoreNode, waiting a moment for it to answer."""
    found: list[dict[str, Any]] = []

    def one() -> bool:
        found[:] = [node for node in app.status()["store"] if "tiers" in node]
        return len(found) == 1

    until(one, 60.0, "one store node in the status", lambda: app.status()["store"])
    return found[0]


def saved(app: App, blocks_before: int, blocks: int) -> None:
    until(
        lambda: store(app)["tiers"]["dram"]["stored_total"] >= blocks_before + blocks,
        20.0,
        f"{blocks} more blocks in DRAM",
        lambda: store(app)["tiers"],
    )


def loaded_blocks(app: App) -> int:
    """Number of blocks that the prefill engine has loaded from DRAM. It loads what it finds, also
    where the node answered too late for the plan, as on a busy machine."""
    return int(app.replica("prefill")["store"].get("loaded_dram", 0))


def test_the_prefill_engine_loads_what_the_decode_engine_computed(app: App) -> None:
    """It is tried again where the node answered too late for the plan, as on a busy machine."""
    for attempt in range(8):
        prompt, salt = noise(BLOCKS * BLOCK + 40, 340 + attempt), uuid.uuid4().hex
        before = store(app)["tiers"]["dram"]["stored_total"]
        with app.policy("local"):
            computed, plan = ask(app, prompt, salt)
        assert (plan["kind"], plan["loaded_tokens"]) == ("local", 0)
        saved(app, before, BLOCKS)
        computed_before = app.replica("prefill")["prompt_tokens_computed"]
        loaded_before = loaded_blocks(app)
        with app.policy("remote"):
            loaded, plan = ask(app, prompt, salt)
        assert loaded == computed and plan["kind"] == "remote"
        if plan["loaded_tokens"] == BLOCKS * BLOCK:
            break
    assert plan["loaded_tokens"] == BLOCKS * BLOCK
    prefill = app.replica("prefill")
    assert prefill["store"]["loaded_dram"] - loaded_before == BLOCKS
    assert prefill["prompt_tokens_computed"] - computed_before == 40


def test_a_prompt_that_lies_on_disk_only_is_planned_as_loaded_and_loaded(app: App) -> None:
    """Tried anew where the node answered too late for the plan, as on a busy machine."""
    for attempt in range(8):
        prompt, salt = noise(BLOCKS * BLOCK + 40, 320 + attempt), uuid.uuid4().hex
        before = store(app)["tiers"]["dram"]["stored_total"]
        with app.policy("local"):
            computed, _ = ask(app, prompt, salt)
        saved(app, before, BLOCKS)
        until(
            lambda: store(app)["write_behind"]["backlog_blocks"] == 0,
            60.0,
            "all blocks on disk",
            lambda: store(app)["write_behind"],
        )
        with Arena.create_or_attach(store(app)["name"], 1 << 30) as arena:
            arena.clear()
        assert store(app)["tiers"]["dram"]["blocks"] == 0
        loaded_before = app.replica("prefill")["store"].get("loaded_nvme", 0)
        with app.policy("remote"):
            loaded, plan = ask(app, prompt, salt)
        assert loaded == computed
        assert app.replica("prefill")["store"]["loaded_nvme"] - loaded_before == BLOCKS
        if plan["loaded_from"] == {"nvme": BLOCKS * BLOCK}:
            break
    assert (plan["kind"], plan["loaded_tokens"]) == ("remote", BLOCKS * BLOCK)


def test_another_tenant_finds_nothing(app: App) -> None:
    prompt, salt = noise(3 * BLOCK + 1, 302), uuid.uuid4().hex
    before = store(app)["tiers"]["dram"]["stored_total"]
    with app.policy("local"):
        ask(app, prompt, salt)
        saved(app, before, 3)
    loaded_before = loaded_blocks(app)
    with app.policy("remote"):
        _, plan = ask(app, prompt, uuid.uuid4().hex)
        assert plan["loaded_tokens"] == loaded_blocks(app) - loaded_before == 0
        ask(app, prompt, salt)
        assert loaded_blocks(app) - loaded_before == 3


def test_warming_makes_kv_before_the_first_client_comes(app: App) -> None:
    prompt, salt = noise(2 * BLOCK + 9, 303), uuid.uuid4().hex
    answer = app.client.post(
        "/headrace/v1/warm", json={"prompts": [prompt], "cache_salt": salt, "pin": True}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "prompts": [
            [
                {
                    "prompt_tokens": len(prompt),
                    "cached_tokens": 0,
                    "stored_tokens": 2 * BLOCK,
                    "pinned_tokens": 2 * BLOCK,
                }
            ]
        ]
    }
    assert store(app)["tiers"]["dram"]["pinned"] >= 2
    loaded_before = loaded_blocks(app)
    with app.policy("remote"):
        ask(app, prompt, salt)
    assert loaded_blocks(app) - loaded_before == 2


def test_a_prompt_that_cannot_be_warmed_is_told_and_costs_the_others_nothing(app: App) -> None:
    body = {"prompts": [[10**9], noise(9, 304)]}
    answer = app.client.post("/headrace/v1/warm", json=body)
    assert answer.status_code == 200, answer.text
    [[wrong], [right]] = answer.json()["prompts"]
    assert "error" in wrong and right["prompt_tokens"] == 9


def test_a_killed_store_node_costs_no_request_and_comes_back_with_its_disk(app: App) -> None:
    node = store(app)
    assert node["tiers"]["nvme"]["state"] == "on"
    prompt, salt = noise(4 * BLOCK + 1, 305), uuid.uuid4().hex
    before = node["tiers"]["dram"]["stored_total"]
    with app.policy("local"):
        answers = [ask(app, prompt, salt)[0]]
        saved(app, before, 4)
        until(
            lambda: store(app)["write_behind"]["backlog_blocks"] == 0,
            60.0,
            "all blocks on disk",
            lambda: store(app)["write_behind"],
        )
        os.kill(node["pid"], signal.SIGKILL)
        answers += [ask(app, noise(300, 306 + n), salt)[0] for n in range(3)]
        answers.append(ask(app, prompt, salt)[0])
    assert answers[0] == answers[-1] and all(answers)
    until(lambda: store(app)["pid"] != node["pid"], 60.0, "another store node")
    until(
        lambda: store(app)["tiers"]["nvme"]["scan"]["blocks"] >= 4,
        60.0,
        "the disk's blocks found again",
        lambda: store(app)["tiers"],
    )

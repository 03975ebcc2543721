"""Usage beside the engines' counters: 10,000 requests over all paths, and the mismatches.

    python -m benchmarks.usage [--requests N] [--clients N] [--kills N] [--seed N] [--model MODEL]
                               [--json FILE]

Starts an app with two decode replicas, one prefill replica, the store and keys of two tenants.
Clients send chats and completions, whole and streamed, whose prompts are new, repeated (cached or
stored) or share a beginning. Plans are forced local, then remote, then follow the cost. A tenth of
the clients hang up midway. Decode replicas are killed (SIGKILL) while they answer.

When all is idle, these must be equal; each pair that is not counts one:

    mismatch.counters     a living replica's usage and what vLLM counts there: tokens computed,
                          decoded and cached, draft tokens, and seconds of steps
    mismatch.sums         a living replica's usage and the sum of its parts of all requests; prompts
                          of the app's own have no tenant and are left out
    mismatch.requests     a whole answer's `usage` in the API and the request's usage by its id
    mismatch.headers      a whole answer's header and the request's usage by its id
    mismatch.ledger       the ledger and the replicas' totals; of killed replicas, which cannot be
                          asked, the ledger must have at least the requests of earlier phases

The usage of a request by its id lacks the parts of replicas that are gone, so requests whose answer
a killed replica began are not compared one by one. The ledger has their usage, except for the last
second before the kill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import report
from benchmarks.instance import running_instance
from benchmarks.serving.environment import machine
from headrace.config.key_file import KeyEntry, KeyFile, hash_of, new_key, write_keys
from headrace_engine.usage.request_usage import NAMES

TENANTS = ("shop", "bank")
COUNTED = ("computed_tokens", "decode_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens")
"""Quantities that vLLM counts, too."""
MISMATCHES = ("counters", "sums", "requests", "headers", "ledger")
WORDS = ("river", "stone", "cloud", "lamp", "road", "tree", "glass", "bread", "wheel", "paper")
IDLE_S = 120.0
BACK_S = 300.0
"""Seconds for a killed replica's successor."""
LEDGER_S = 4.0
"""Seconds after which the ledger has what replicas counted: gateways ask them each second."""


@dataclass
class Sent:
    """A request that was sent, and its answer."""

    request_id: str
    tenant: str
    aborted: bool
    status: int = 0
    usage: Mapping[str, Any] | None = None
    header: str | None = None
    replica: str = ""
    streamed: bool = False


@dataclass
class Load:
    """The clients of the app.

    Attributes:
        sent: all requests so far.
    """

    url: str
    model: str
    keys: Mapping[str, str]
    rng: random.Random
    sent: list[Sent] = field(default_factory=list)
    _prompts: list[str] = field(default_factory=list)

    def bearer(self, tenant: str) -> dict[str, str]:
        """Return the header with a tenant's key."""
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    async def run(self, client: httpx.AsyncClient, count: int, clients: int) -> None:
        """Send a number of requests, so many at a time."""
        left = iter(range(count))

        async def one_client() -> None:
            for _ in left:
                await self._send(client)

        await asyncio.gather(*(one_client() for _ in range(clients)))

    def _prompt(self) -> str:
        rng = self.rng
        if self._prompts and rng.random() < 0.4:
            prompt = rng.choice(self._prompts[-200:])
            return prompt if rng.random() < 0.5 else prompt + " " + rng.choice(WORDS)
        prompt = " ".join(rng.choices(WORDS, k=rng.choice((5, 20, 60, 150))))
        self._prompts.append(prompt)
        return prompt

    async def _send(self, client: httpx.AsyncClient) -> None:
        rng = self.rng
        tenant, streamed = rng.choice(TENANTS), rng.random() < 0.5
        sent = Sent(f"usage-{len(self.sent)}-{rng.getrandbits(32):08x}", tenant, False)
        sent.streamed, sent.aborted = streamed, rng.random() < 0.1
        self.sent.append(sent)
        body: dict[str, Any] = {
            **{"model": self.model, "temperature": 0, "max_tokens": rng.choice((1, 2, 8, 24))},
            **({"stream": True, "stream_options": {"include_usage": True}} if streamed else {}),
        }
        path = "/v1/completions"
        if rng.random() < 0.5:
            path, body["messages"] = (
                "/v1/chat/completions",
                [{"role": "user", "content": self._prompt()}],
            )
        else:
            body["prompt"] = self._prompt()
        headers = {**self.bearer(tenant), "x-request-id": sent.request_id}
        try:
            async with client.stream("POST", path, json=body, headers=headers) as answer:
                if sent.aborted and not streamed:
                    return
                sent.status, seen = answer.status_code, 0
                sent.header = answer.headers.get("x-headrace-usage")
                sent.replica = answer.headers.get("x-headrace-replica", "")
                whole = b""
                async for chunk in answer.aiter_bytes():
                    whole, seen = whole + chunk, seen + 1
                    if sent.aborted and seen >= 2:
                        return
                sent.usage = _usage(whole, streamed)
        except httpx.HTTPError:
            sent.status = -1


def _usage(body: bytes, streamed: bool) -> Mapping[str, Any] | None:
    if not streamed:
        return dict(json.loads(body).get("usage") or {}) or None
    last = [line for line in body.split(b"\n\n") if line.startswith(b"data: {")][-1:]
    return dict(json.loads(last[0][6:]).get("usage") or {}) or None if last else None


class Admin:
    """What an administrator sees."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=120)

    def get(self, path: str) -> dict[str, Any]:
        """Return a document."""
        return dict(self.client.get(path).raise_for_status().json())

    def replicas(self) -> list[dict[str, Any]]:
        """Return the replicas' state."""
        return list(self.get("/headrace/v1/status")["replicas"])

    def set_policy(self, policy: str) -> None:
        """Force plans."""
        self.client.put("/headrace/v1/router", json={"policy": policy}).raise_for_status()

    def wait_idle(self) -> None:
        """Wait until no engine has a request, and its last usage has arrived."""
        until = time.monotonic() + IDLE_S
        quiet = 0
        while quiet < 3 and time.monotonic() < until:
            busy = any(one["running"] or one["waiting"] for one in self.replicas())
            quiet = 0 if busy else quiet + 1
            time.sleep(1.0)

    def wait_back(self, decodes: int) -> None:
        """Wait until so many decode replicas answer."""
        until = time.monotonic() + BACK_S
        while time.monotonic() < until:
            if sum(one["role"] == "decode" for one in self.replicas()) >= decodes:
                return
            time.sleep(2.0)
        raise RuntimeError("a killed replica has no successor")


def main() -> int:
    """Measure, print, write; 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.usage")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="folder of the model; a tiny one is made by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = options.model or _tiny_model()
    keys = {name: new_key() for name in (*TENANTS, "admin")}
    with tempfile.TemporaryDirectory(prefix="hru-") as folder:
        file = Path(folder) / "keys.yaml"
        write_keys(file, KeyFile(keys=[_entry(*each) for each in keys.items()]))
        settings = [
            *("prefill.replicas=1", "decode.replicas=2", f"gateway.api_keys_file={file}"),
            *("gateway.request_timeout_s=600", "model.max_model_len=2048"),
            *("speculation.enabled=true", "speculation.mode=static:3"),
        ]
        with running_instance("usage", settings, model) as instance:
            figures = measure(
                Admin(instance.endpoint, keys["admin"]), instance.model, keys, options
            )
    report(figures, {f"mismatch.{name}": "0" for name in MISMATCHES}, machine(), options.json)
    return int(any(figures[f"mismatch.{name}"] for name in MISMATCHES))


def _tiny_model() -> str:
    from tests.support.tiny import tiny_llama

    return str(tiny_llama())


def _entry(name: str, key: str) -> KeyEntry:
    return KeyEntry(
        name=name,
        hash=hash_of(key.encode()),
        tenant=name,
        role="admin" if name == "admin" else "user",
    )


def measure(
    admin: Admin, model: str, keys: Mapping[str, str], options: argparse.Namespace
) -> dict[str, float]:
    """Send the requests, and compare."""
    load = Load(str(admin.client.base_url), model, keys, random.Random(options.seed))
    comparison, killed = Comparison(admin), set[str]()
    began = time.monotonic()
    phases = 3 + options.kills
    count = options.requests // phases
    for number in range(phases):
        admin.set_policy(("local", "remote", "cost")[min(number, 2)])
        victim = None
        if number >= 3:
            victim = next(one for one in admin.replicas() if one["role"] == "decode")
            killed.add(victim["replica_id"])
        before = len(load.sent)
        size = count if number < phases - 1 else options.requests - before
        asyncio.run(_phase(load, size, options.clients, victim))
        print(f"{len(load.sent)} requests, {time.monotonic() - began:.0f} s", flush=True)
        if victim is not None:
            admin.wait_back(2)
        admin.wait_idle()
        comparison.requests(load.sent[before:], killed)
    time.sleep(LEDGER_S)
    totals = comparison.replicas(killed)
    figures: dict[str, float] = {f"mismatch.{name}": comparison.wrong[name] for name in MISMATCHES}
    figures |= {f"total.{name}": totals[name] for name in NAMES}
    return figures | {
        "requests": len(load.sent),
        "answered": sum(sent.status == 200 for sent in load.sent),
        "aborted": sum(sent.aborted for sent in load.sent),
        "failed": sum(sent.status not in (0, 200) for sent in load.sent),
        "compared": comparison.compared,
        "killed": len(killed),
    }


async def _phase(load: Load, count: int, clients: int, victim: Mapping[str, Any] | None) -> None:
    limits = httpx.Limits(max_connections=clients + 2)
    async with httpx.AsyncClient(base_url=load.url, timeout=600, limits=limits) as client:

        async def kill() -> None:
            if victim is not None:
                before = len(load.sent)
                while len(load.sent) < before + count // 2:
                    await asyncio.sleep(0.01)
                os.kill(victim["pid"], signal.SIGKILL)

        await asyncio.gather(load.run(client, count, clients), kill())


class Comparison:
    """Usage beside counters, ledger and answers.

    Attributes:
        wrong: numbers of mismatches by kind.
        compared: number of answers that were compared one by one.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._by_replica: dict[str, Counter[str]] = {}
        self.wrong: Counter[str] = Counter({name: 0 for name in MISMATCHES})
        self.compared = 0

    def requests(self, sent: Sequence[Sent], killed: Collection[str]) -> None:
        """Compare the answers of a phase with the usage of their requests."""
        for one in sent:
            answer = self._admin.client.get(f"/headrace/v1/usage/{one.request_id}")
            if answer.status_code != 200:
                if one.status == 200 and not one.aborted and one.replica not in killed:
                    self._differ("requests", f"{one.request_id} is unknown", 0, 1)
                continue
            document = answer.json()
            for part in document["parts"]:
                if part["tenant"] != one.tenant:
                    self._differ("requests", f"{one.request_id}: tenant {part['tenant']}", 0, 1)
                replica = self._by_replica.setdefault(part["replica_id"], Counter())
                replica.update(part["usage"])
            if one.usage and not one.aborted and one.status == 200 and one.replica not in killed:
                self._answer(one, document["usage"])

    def _answer(self, sent: Sent, usage: Mapping[str, float]) -> None:
        assert sent.usage is not None
        self.compared += 1
        fields = {"prompt_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
        for ours, theirs in fields.items():
            what = f"{sent.request_id} {ours}"
            self._differ("requests", what, usage[ours], sent.usage[theirs])
        if sent.header is not None:
            told = dict(each.split("=") for each in sent.header.split(", "))
            for name in NAMES:
                tolerance = 1e-5 if name == "engine_s" else 0.0
                what = f"{sent.request_id} {name}"
                self._differ("headers", what, float(told.get(name, 0)), usage[name], tolerance)

    def replicas(self, killed: Collection[str]) -> Counter[str]:
        """Compare the replicas' sums with counters, requests and ledger; return the sum."""
        totals: Counter[str] = Counter()
        for replica in self._admin.replicas():
            name, usage = replica["replica_id"], replica["usage"]
            total, parts = usage["total"], self._by_replica.get(name, Counter())
            totals.update(total)
            for each in COUNTED:
                what = f"{name} {each}"
                self._differ("counters", what, total.get(each, 0), usage["vllm"].get(each, 0))
            slack = 1e-6 * usage["step_s"]
            seconds = total.get("engine_s", 0)
            self._differ("counters", f"{name} engine_s", seconds, usage["step_s"], slack)
            for each in NAMES:
                clients = total.get(each, 0) - usage["without_tenant"].get(each, 0)
                tolerance = slack if each == "engine_s" else 0.0
                self._differ("sums", f"{name} {each}", clients, parts[each], tolerance)
        ledger: Counter[str] = Counter()
        for row in self._admin.get("/headrace/v1/usage?since=48h")["usage"]:
            ledger.update({each: row[each] for each in NAMES})
        for each in NAMES:
            gone = ledger[each] - totals[each]
            known = sum(self._by_replica.get(name, Counter())[each] for name in killed)
            tolerance = 1e-3 if each == "engine_s" else 0.0
            missing = max(0.0, known - gone) if killed else gone
            self._differ("ledger", each, missing, 0, tolerance)
        return totals

    def _differ(
        self, kind: str, what: str, one: float, other: float, tolerance: float = 0.0
    ) -> None:
        if abs(one - other) > tolerance:
            self.wrong[kind] += 1
            if self.wrong[kind] <= 5:
                print(f"{kind}: {what}: {one} and {other}")


if __name__ == "__main__":
    sys.exit(main())

"""One family's way through all cases, on two machines of one loopback.

The decode engine and the prefill engine are processes, each with an arena and a StoreNode of its
own; the decode machine's node is a peer of the other one. Each case asks for the same prompts under
a salt, so what one case leaves in the caches is no hit of another one.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.families.cases import (
    ANSWER_TOKENS,
    ANSWERS,
    BY_NAME,
    CASES,
    Answer,
    Case,
    Hit,
    full,
    half,
    prompts,
    verdict,
    why_another_way,
)
from benchmarks.families.models import Family
from benchmarks.kvstore.child import Child
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.resume.emitted import decode_lines, tokens_of_choice
from headrace_decode.speculative.settings import engine_arguments
from headrace_engine.kv_transfer.handoff import produce_params
from headrace_engine.kv_transfer.ports import free_port_block
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY
from headrace_kvstore.protocol.wire import socket_path
from tests.support import run
from tests.support.connectors import (
    beside,
    blending_connector,
    checked_nixl_connector,
    side_channel,
    store_connector,
)
from tests.support.families import POSITIONS, write_family
from tests.support.forked import Forked
from tests.support.program import IN_ONE_PROCESS, engine_environment
from tests.support.storenode import StoreNodeProcess

DRAM_BYTES = 512 << 20
SECRET = "of the nodes of this benchmark"
DRAFT_TOKENS, BEFORE_KILL = 4, 6
"""Tokens of each answer before its engine is killed, at least."""
PATIENCE_S = 60.0
KV_SPACE_GIB = "1"


class Refused(Exception):
    """The app does not do it with this family; the message says why."""


class Machine:
    """An engine's process, an arena and a StoreNode.

    Args:
        folder: for the log.
        name: `prefill` or `decode`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._folder = name, folder
        self.arena_name = f"headrace-families-{uuid.uuid4().hex[:12]}"
        self.log = folder / f"{name}.log"
        self.node: StoreNodeProcess | None = None
        self.store = {
            "name": self.arena_name,
            "dram_bytes": DRAM_BYTES,
            "priced": False,
            "node_timeout_s": PATIENCE_S,
            "lease_s": 2 * PATIENCE_S,
        }
        self._begin()

    def _begin(self) -> None:
        run.engine_started()
        environment = engine_environment(**IN_ONE_PROCESS) | side_channel()
        environment["VLLM_CPU_KVCACHE_SPACE"] = KV_SPACE_GIB
        self.child = Child("engine", {}, environment, self.log, "benchmarks.families.", Forked)
        self.child.answer()

    def start_node(self, facts: dict[str, Any], **settings: Any) -> None:
        """Start the StoreNode for an engine with these facts."""
        self.node = StoreNodeProcess(
            name=self.arena_name,
            dram_bytes=DRAM_BYTES,
            block_bytes=facts["block_bytes"],
            layers=facts["layers"],
            keep_arena=True,
            secret=SECRET,
            pull_limit_s=PATIENCE_S,
            peer_lease_s=2 * PATIENCE_S,
            **settings,
        ).start()

    def remote(self) -> dict[str, Any]:
        """Return what the node says of its peers."""
        assert self.node is not None
        return dict(self.node.stats()["remote"])

    def stored(self) -> int:
        """Return the number of blocks in the arena."""
        with Arena.create_or_attach(self.arena_name, DRAM_BYTES) as arena:
            return int((arena.table["state"] == READY).sum())

    def restart(self) -> None:
        """Kill the engine's process, and begin another one."""
        self.child.kill()
        self._begin()

    def end(self) -> None:
        """Kill all, and give the memory back."""
        self.child.kill()
        if self.node is not None:
            self.node.kill()
        (Path("/dev/shm") / self.arena_name).unlink(missing_ok=True)
        socket = socket_path(self.arena_name)
        for file in (socket, socket.with_suffix(".lock")):
            file.unlink(missing_ok=True)


@contextmanager
def machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Begin a prefill and a decode machine; end them."""
    begun: list[Machine] = []
    try:
        for name in ("prefill", "decode"):
            begun.append(Machine(folder, name))
        yield begun[0], begun[1]
    finally:
        for machine in begun:
            machine.end()


class Trial:
    """A family's cases.

    Args:
        answers: of each case.
        report: called with a line for each case.
    """

    def __init__(
        self,
        family: Family,
        prefill: Machine,
        decode: Machine,
        folder: Path,
        answers: int = ANSWERS,
        report: Callable[[str], None] = print,
    ) -> None:
        self._family, self._prefill, self._decode = family, prefill, decode
        self._report = report
        self._model = write_family(folder, family.name)
        self._prompts = prompts(family.lengths, answers)
        self._truths: list[Answer] = []
        self._facts: dict[str, Any] = {}
        self._plain_found: dict[str, Any] = {}
        self._found: dict[str, dict[str, Any]] = {}

    def results(self, only: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Go through the cases; return what the results file has of the family.

        Args:
            only: names of cases; empty for all.
        """
        began = time.perf_counter()
        chosen = [case for case in CASES if not only or case.name in only]
        self._plain_found = plain = self._plain()
        self._techniques()
        if any(case.name == "drafting" for case in chosen):
            self._run(BY_NAME["drafting"], self._drafted)
        self._open()
        leaks = {}
        for case in chosen:
            if case.name in ("drafting", "resume after kill"):
                continue
            whys = [self._facts["no_store"]] * case.needs_store
            whys += [self._facts["no_prefix_cache"]] * case.needs_prefix_cache
            if why := next(filter(None, whys), None):
                self._found[case.name] = {"refused": why}
                continue
            self._run(case, getattr(self, "_" + case.name.replace(",", "").replace(" ", "_")))
        leaks["decode"] = self._settled(self._decode)
        if any(case.name == "resume after kill" for case in chosen):
            self._run(BY_NAME["resume after kill"], self._resume_after_kill)
        leaks["prefill"] = self._settled(self._prefill)
        shutil.rmtree(self._model)
        family = self._family
        return {
            "title": family.title,
            "layers": family.layers,
            "dtype": family.dtype,
            "limit": family.limit,
            "facts": self._facts,
            "plain": plain,
            "cases": {case.name: self._found[case.name] for case in chosen},
            "leaked_blocks": leaks,
            "seconds": round(time.perf_counter() - began, 1),
        }

    def _start(
        self, machine: Machine, transfer: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        options = {"max_model_len": POSITIONS, **self._family.options, **more.pop("options", {})}
        found: dict[str, Any] = machine.child.do(
            "open",
            model=str(self._model),
            dtype=self._family.dtype,
            options=options,
            transfer=transfer,
            **more,
        )
        return found

    def _plain(self) -> dict[str, Any]:
        """Have plain vLLM give the right answers, and give them again with its prefix cache."""
        self._facts = self._start(self._decode, extensions=False)
        told = self._ask(self._decode, "plain", logprobs=2)
        self._truths = [Answer(*each) for each in told["answers"]]
        found: dict[str, Any] = {"seconds": round(told["seconds"], 1)}
        try:
            again = self._ask(self._decode, "plain")
            found |= verdict(self._answers(again), self._truths, self._family.dtype)
            found["local"] = again["local"]
            if self._family.dtype != "float32":
                found["continued"] = self._continued()
        except RuntimeError as error:
            found["error"] = _first_line(error)
            self._decode.restart()
        self._report(f"plain vLLM: {found}")
        return found

    def _continued(self) -> dict[str, Any]:
        """Have plain vLLM compute the first tokens of its answers as a part of the prompts, by its
        kernels for prompts in place of those for answers, and continue them."""
        first = BEFORE_KILL
        known = zip(self._prompts, self._truths, strict=True)
        prompts = [[*prompt, *truth.tokens[:first]] for prompt, truth in known]
        told = self._ask(
            self._decode, "continued", prompts=prompts, max_tokens=ANSWER_TOKENS - first
        )
        rest = [
            Answer(tokens[first:], logprobs[first:], leads[first:])
            for tokens, logprobs, leads in self._truths
        ]
        return verdict(self._answers(told), rest, self._family.dtype)

    def _techniques(self) -> None:
        """Ask an engine with all techniques which of them it does not do."""
        name = f"{self._prefill.arena_name}-t"
        store = {"name": name, "dram_bytes": 32 << 20, "node": False}
        connectors = store_connector(store), blending_connector(store)
        settings = SparseSettings().additional_config() | CompressionSettings().additional_config()
        try:
            told = self._start(
                self._prefill, beside(*connectors), options={"additional_config": settings}
            )
            self._facts["unsupported"] = told["unsupported"]
        except RuntimeError as error:
            why = f"an engine with all techniques on does not start: {_first_line(error)}"
            self._facts["unsupported"] = dict.fromkeys(("blending", "sparse", "compression"), why)
            self._prefill.restart()
        finally:
            (Path("/dev/shm") / name).unlink(missing_ok=True)
        self._report(f"not supported: {self._facts['unsupported']}")

    def _open(self) -> None:
        """Start both engines as the app's are, each in a process that had no other, and their
        nodes: vLLM chooses the order of states for the first engine of a process."""
        for machine in (self._prefill, self._decode):
            machine.restart()
        with ThreadPoolExecutor() as pool:
            facts = list(pool.map(self._open_one, (self._prefill, self._decode)))
        self._facts["no_store"] = facts[0]["no_store"]
        if self._facts["no_store"] is None:
            address = f"127.0.0.1:{free_port_block(1, '127.0.0.1')}"
            self._prefill.start_node(self._facts, listen=address)
            self._decode.start_node(self._facts, peers=address)

    def _open_one(self, machine: Machine) -> dict[str, Any]:
        transfer = beside(checked_nixl_connector(), store_connector(machine.store))
        return self._start(machine, transfer)

    def _run(self, case: Case, ask: Callable[[], dict[str, Any]]) -> None:
        """Go through one case; keep its numbers, or its error."""
        began = time.perf_counter()
        try:
            told = ask()
            found = verdict(self._answers(told), self._truths, self._family.dtype)
            hit = Hit(told["local"], told["external"])
            lengths = [len(prompt) for prompt in self._prompts]
            block = self._facts["block"]
            found |= {
                "prompt_tokens": sum(lengths),
                "local": hit.local,
                "external": hit.external,
                "events": told["events"],
            }
            if why := why_another_way(case, lengths, block, hit, told["events"]):
                found["error"] = why
        except Refused as why_not:
            found = {"refused": str(why_not)}
        except RuntimeError as error:
            found = {"error": _first_line(error)}
            if case.name == "drafting" and (why := self._plain_drafting_error()) is not None:
                found = {"plain_error": f"with vLLM's own drafts, too: {why}"}
            if "error" in self._plain_found and case.needs_hit:
                found = {"plain_error": self._plain_found["error"]}
            for machine in (self._prefill, self._decode):
                machine.restart()
            if case.name != "drafting":
                with ThreadPoolExecutor() as pool:
                    list(pool.map(self._open_one, (self._prefill, self._decode)))
        found["seconds"] = round(time.perf_counter() - began, 1)
        self._found[case.name] = found
        self._report(f"{case.name}: {found}")

    def _ask(self, machine: Machine, salt: str, **more: Any) -> dict[str, Any]:
        task = {"prompts": self._prompts, "max_tokens": ANSWER_TOKENS} | more
        told: dict[str, Any] = machine.child.do("ask", salt=salt, **task)
        return told

    def _answers(self, told: dict[str, Any]) -> list[Answer]:
        return [Answer(*each) for each in told["answers"]]

    def _cold(self) -> dict[str, Any]:
        return self._ask(self._decode, "a")

    _local_hit = _cold

    def _store_hit(self) -> dict[str, Any]:
        self._saved(self._decode, [full(len(prompt) + 1, self._block) for prompt in self._prompts])
        self._decode.child.do("forget")
        return self._cold()

    def _local_prefix_store_tail(self) -> dict[str, Any]:
        self._decode.child.do("forget")
        first = [prompt[: half(len(prompt), self._block) + 1] for prompt in self._prompts]
        self._ask(self._decode, "a", prompts=first, max_tokens=1)
        return self._cold()

    def _peer(self) -> dict[str, Any]:
        self._ask(self._prefill, "b", max_tokens=1)
        blocks = self._saved(
            self._prefill, [full(len(prompt), self._block) for prompt in self._prompts]
        )

        def known() -> bool:
            [peer] = self._decode.remote()["peers"].values()
            return int(peer["blocks"]["DRAM"]) >= blocks

        _wait(known, "the peer's blocks are not known")
        before = self._decode.remote()["pull"].get("pulled", 0)
        told = self._ask(self._decode, "b")
        told["events"]["pulled"] = self._decode.remote()["pull"].get("pulled", 0) - before
        return told

    def _remote_prefill(self) -> dict[str, Any]:
        return self._ask(self._decode, "c", transfers=self._kept("c"))

    def _failed_transfer(self) -> dict[str, Any]:
        kept = self._kept("c")
        return self._ask(self._decode, "d", transfers=[*kept[1:], kept[0]])

    def _resume_after_kill(self) -> dict[str, Any]:
        lines: list[str] = self._decode.child.do(
            "begin", prompts=self._prompts, salt="e", max_tokens=ANSWER_TOKENS, at_least=BEFORE_KILL
        )
        self._decode.child.kill()
        earlier = [tokens_of_choice(decode_lines(each.encode()), 0) for each in lines]
        cut = [n for n, tokens in enumerate(earlier) if len(tokens) < ANSWER_TOKENS]
        told = self._ask(
            self._prefill,
            "e",
            prompts=[self._prompts[n] for n in cut],
            earlier=[earlier[n] for n in cut],
        )
        whole: list[list[Any]] = [[tokens, [], []] for tokens in earlier]
        for n, (tokens, *more) in zip(cut, told["answers"], strict=True):
            whole[n] = [earlier[n] + tokens, *more]
        told["answers"] = whole
        told["events"]["resumed"] = len(cut)
        return told

    def _drafted(self) -> dict[str, Any]:
        drafting = engine_arguments(DRAFT_TOKENS, mode=f"static:{DRAFT_TOKENS}")
        del drafting["worker_cls"]
        if why := self._start(self._prefill, options=drafting).get("no_drafts"):
            raise Refused(why)
        self._ask(self._prefill, "f")
        self._prefill.child.do("forget")
        return self._ask(self._prefill, "f")

    def _plain_drafting_error(self) -> str | None:
        """Return why a plain engine does not draft, either."""
        drafting = {
            "method": "ngram",
            "num_speculative_tokens": DRAFT_TOKENS,
            "prompt_lookup_max": 2,
        }
        self._prefill.restart()
        try:
            self._start(self._prefill, extensions=False, options={"speculative_config": drafting})
            self._ask(self._prefill, "f")
        except RuntimeError as error:
            return _first_line(error)
        return None

    @property
    def _block(self) -> int:
        return int(self._facts["block"])

    def _kept(self, salt: str) -> list[dict[str, Any]]:
        """Have the prefill engine keep the KV of all prompts; return how it is pulled."""
        keep = [produce_params()] * len(self._prompts)
        told = self._ask(self._prefill, salt, max_tokens=1, transfers=keep)
        kept: list[dict[str, Any]] = told["transfers"]
        return kept

    def _saved(self, machine: Machine, tokens: list[int]) -> int:
        """Wait until a machine's store has this many tokens of each prompt, and states; return the
        number of its blocks."""
        blocks = sum(tokens) // self._block

        def saved() -> bool:
            machine.child.do("ask", prompts=[[5]], salt="idle", max_tokens=1)
            return machine.stored() >= blocks

        _wait(saved, "blocks are not saved")
        self._settled(machine)
        return machine.stored()

    def _settled(self, machine: Machine) -> int | str:
        try:
            return int(machine.child.do("settle"))
        except RuntimeError as error:
            return _first_line(error)


def _wait(condition: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(why)
        time.sleep(0.05)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]

"""Two replicas that share what they learn over a store node, each a process of its own.

A answers every second exchange of a corpus while B answers the others. One second after A's last
answer both are asked A's exchanges again. Then a third replica starts, and the node is killed.

- ``share.acceptance_a``, ``share.acceptance_b_on_a``: accepted tokens per query of A and of B on
  what A had answered; ``share.ratio`` is B's over A's, ``share.acceptance_alone`` that of a memory
  that shares nothing and has answered as B has
- ``share.visible_s``: from the end of one answer on A until B has taken it in, median
- ``share.bytes_per_token``: bytes that A posted over tokens that it answered
- ``share.longest_hold_ms``: longest time for which carrying held a memory's lock, of A and B
- ``share.idle_cpu_us_per_s``: CPU time of the carrying thread when there is nothing to carry
- ``share.warm_s``, ``share.acceptance_new``: seconds until a new replica has all answers, and its
  accepted tokens per query after that
- ``share.acceptance_killed``, ``share.acceptance_killed_own``: accepted tokens per query of B and
  of A on A's answers after the node was killed
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from benchmarks.draft_memory.arms import Ours
from benchmarks.draft_memory.corpora import Exchange
from benchmarks.draft_memory.processes import FLOOR, Child, Node, Replica, folder
from benchmarks.draft_memory.replay import replay

LIMIT_S, WATCHED_S = 120.0, 15.0
SINGLE = 11
"""Exchanges that are answered one at a time, and as many after the node's end."""


def measure(exchanges: list[Exchange]) -> dict[str, float]:
    """Return all figures on one corpus."""
    killed, single = exchanges[:SINGLE], exchanges[SINGLE : 2 * SINGLE]
    of_a, of_b = exchanges[2 * SINGLE :: 2], exchanges[2 * SINGLE + 1 :: 2]
    children: list[Child] = []
    with folder() as name:
        try:
            node = Child(Node, Path(name))
            node.call("gossip_stats")
            children += [node, Child(Replica, Path(name)), Child(Replica, Path(name))]
            return _measure(children, name, of_a, of_b, single, killed)
        finally:
            for child in children:
                child.kill()


def _measure(
    children: list[Child],
    name: str,
    of_a: list[Exchange],
    of_b: list[Exchange],
    single: list[Exchange],
    killed: list[Exchange],
) -> dict[str, float]:
    node, a, b = children
    seen_s = []
    for number, exchange in enumerate(single, 1):
        a.call("answer", [exchange])
        start_s = time.perf_counter()
        assert b.call("wait", number, LIMIT_S), "an answer did not arrive"
        seen_s.append(time.perf_counter() - start_s)
    posted = a.call("stats")["posted_bytes"]
    b.call("answer", of_b)
    a.call("answer", of_a)
    time.sleep(1.0)
    on_b = b.call("ask", of_a).accepted_per_query
    on_a = a.call("ask", of_a).accepted_per_query
    answered = sum(len(each.answer) for each in of_a)
    told = a.call("stats")["posted_bytes"] - posted
    alone = Ours(FLOOR)
    replay(alone, of_b)
    figures = {
        "acceptance_a": on_a,
        "acceptance_b_on_a": on_b,
        "ratio": on_b / on_a,
        "acceptance_alone": replay(alone, of_a).accepted_per_query,
        "visible_s": median(seen_s),
        "bytes_per_token": told / answered,
    }
    new = Child(Replica, Path(name))
    children.append(new)
    new.call("stats")
    start_s = time.perf_counter()
    assert new.call("wait", len(of_a) + len(of_b) + len(single), LIMIT_S), "it did not get warm"
    figures["warm_s"] = time.perf_counter() - start_s
    figures["acceptance_new"] = new.call("ask", of_a).accepted_per_query
    time.sleep(1.0)
    before_s = b.call("stats")["thread_s"]
    time.sleep(WATCHED_S)
    figures["idle_cpu_us_per_s"] = 1e6 * (b.call("stats")["thread_s"] - before_s) / WATCHED_S
    figures["longest_hold_ms"] = 1e3 * max(r.call("stats")["max_lock_s"] for r in (a, b))
    node.kill()
    a.call("answer", killed)
    time.sleep(1.0)
    figures["acceptance_killed"] = b.call("ask", killed).accepted_per_query
    figures["acceptance_killed_own"] = a.call("ask", killed).accepted_per_query
    return {f"share.{key}": value for key, value in figures.items()}

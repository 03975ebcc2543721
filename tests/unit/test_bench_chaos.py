"""What the chaos benchmark counts, and how it has pulls of KV fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

from benchmarks.chaos.kv_faults import KV_FAULTS, KvFaults
from benchmarks.chaos.products import (
    LEFT,
    LOST,
    Answer,
    Round,
    _busiest,
    _drawn,
    figures,
    is_wrong,
)
from benchmarks.chaos.streams import Seen

TRUTH = Seen(0, 0.0, tokens=[1, 2, 3], over=True)


def seen(*tokens: int, why: str = "", client: str = "patient", over: bool = True) -> Answer:
    return Answer(0, 0.0, tokens=list(tokens), why=why, over=over, client=client)


def test_a_stream_is_read_to_its_end_or_its_error() -> None:
    one = Seen(0, 0.0, why="no end")
    event = 'data: {"choices": [{"token_ids": [4, 5]}]}'
    assert [one.read(line) for line in (event, "", ": comment", "data: [DONE]")] == [
        *(False, False, False, True)
    ]
    assert (one.tokens, one.why, len(one.came_s)) == ([4, 5], "", 1)
    assert one.read('data: {"error": {"code": "replica_lost"}}')
    assert "replica_lost" in one.why


def test_tokens_of_clients_that_left_count_as_far_as_they_came() -> None:
    assert not is_wrong(seen(1, 2, 3), TRUTH)
    assert is_wrong(seen(1, 2), TRUTH), "it ended early and says that it is whole"
    assert is_wrong(seen(1, 2, 2, 3), TRUTH)
    assert not is_wrong(seen(1, 2, why=LEFT), TRUTH)
    assert is_wrong(seen(1, 1, why=LEFT), TRUTH)
    assert not is_wrong(seen(why="hung"), TRUTH)


def test_the_figures_tell_the_lost_from_those_who_left() -> None:
    answers = [
        seen(1, 2, 3),
        seen(1, 2, 3, client="slow"),
        seen(1, why=LEFT, client="gone"),
        seen(1, why="hung"),
        seen(2, why="502: b''", client="slow"),
        seen(1, over=False),
    ]
    rounds = [Round("killed", "kv_late", 0.0, cut=2, hit=1, seconds=30.0)]
    found = figures(answers, [TRUTH], rounds, 0)
    assert found["answers"] == {"patient": 2, "slow": 2, "gone": 1}
    assert (found["left"], found["lost"], found["hung"], found["held"]) == (1, 2, 1, 0)
    assert found["wrong_or_repeated_tokens"] == 1
    assert (found["streams_cut"], found["pulls_hit"]) == (2, 1)


def test_the_replica_with_the_most_streams_is_hit() -> None:
    streaming = [seen(1) for _ in range(3)]
    for each, replica in zip(streaming, "bab", strict=True):
        each.replica = replica
    assert _busiest({"c", "b", "a"}, streaming) == 1
    assert _busiest({"c"}, []) == 0


def test_every_product_comes_before_one_comes_again() -> None:
    drawn = _drawn(20, [*LOST, *KV_FAULTS], Random(1))
    counts = Counter(drawn)
    assert len(counts) == len(LOST) * len(KV_FAULTS) == 9
    assert set(counts.values()) <= {2, 3} and len(drawn) == 20
    assert _drawn(2, ["killed", "kv_late"], Random(1)) == [("killed", "kv_late")] * 2


PULL = """
import sys, types
sys.path.insert(0, sys.argv[1])
import headrace_engine.pull_proof.worker_connector as worker_connector

class Worker(worker_connector.ProvenWorker):
    def __init__(self): self.refused = []
    def _refuse(self, name, why): self.refused.append(name)

worker = Worker()
print(len(worker.refused), end=" ")
worker._read_blocks_for_req("r", None)
print(len(worker.refused))
"""


def test_an_engine_does_with_pulls_what_the_file_says(tmp_path: Path) -> None:
    """In a process of its own, since Python reads its path at its start."""
    package = tmp_path / "headrace_engine" / "pull_proof"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "worker_connector.py").write_text(
        "class Unproved(Exception): ...\n"
        "class ProvenWorker:\n"
        "    def _read_blocks_for_req(self, name, meta): ...\n"
        "    def get_finished(self): ...\n"
    )
    faults = KvFaults(tmp_path)

    def refused() -> str:
        command = [sys.executable, "-c", PULL, str(tmp_path)]
        environment = {**os.environ, **faults.environment()}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert (refused(), faults.hit) == ("0 0", 0)
    with faults.breaking(None, "pull_failed"):
        assert (refused(), faults.hit) == ("0 1", 1)
    with faults.breaking(None, "kv_late"):
        assert (refused(), faults.hit) == ("0 0", 2)
    assert (refused(), faults.hit) == ("0 0", 2)

"""What the tests themselves stand on: runs that end, compiled code that is fresh, truths."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests import flaky, lanes
from tests.parts import CHECK, PARTS, Part
from tests.support import run
from tests.support.compiled import digest
from tests.support.costs import BUDGET_S, SLOW_BUDGET_S, Costs, over_budget, slowest
from tests.support.imported import imports
from tests.support.tiny import KV_BYTES_PER_TOKEN, make_tiny_llama, tiny_llama
from tests.support.truth import Truth, kept_answers

ROOT = Path(__file__).parents[2]


class TestARun:
    """A run in a process of its own, whose only child has left its session and its parent."""

    PROGRAM = """
import subprocess, sys, time
from tests.support import run
mark = run.begin()
detach = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
subprocess.run([sys.executable, "-c", detach], check=True)
print(mark, flush=True)
time.sleep(600)
"""

    @pytest.fixture
    def other(self) -> Iterator[tuple[subprocess.Popen[str], str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        mark = process.stdout.readline().strip()
        # A program that has just begun has no environment to read for a moment.
        while process.poll() is None and not run.marked(run.MARK, mark):
            time.sleep(0.05)
        yield process, mark
        process.kill()
        process.wait()
        run.end(mark)

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_leaves_no_process_and_no_folder_however_it_ends(
        self, other: tuple[subprocess.Popen[str], str], how: signal.Signals
    ) -> None:
        process, mark = other
        folder = Path(f"/tmp/hrt-{mark}")
        assert len(run.marked(run.MARK, mark)) == 1 and folder.is_dir()
        process.send_signal(how)
        deadline = time.monotonic() + 60
        while run.marked(run.MARK, mark) or folder.exists():
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.1)

    def test_is_known_by_its_own_mark(self, other: tuple[subprocess.Popen[str], str]) -> None:
        assert other[1] != run.begin()
        assert not set(run.marked(run.MARK, other[1])) & set(run.marked(run.MARK, run.begin()))


def test_each_file_that_needs_neither_a_gpu_nor_an_api_server_is_in_one_part_of_a_run() -> None:
    found = [file for part in PARTS for file in part.files]
    apart = {"gpu", "apiserver"}
    files = (ROOT / "tests").rglob("test_*.py")
    all_files = {file for file in files if not apart & set(file.parts)}
    assert len(found) == len(all_files) and set(found) == all_files
    assert {file for part in CHECK for file in part.files} <= all_files


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vllm\n", True),
        ("from vllm.config import VllmConfig\n", True),
        ("def test() -> None:\n    from vllm import LLM\n", True),
        ('envs = pytest.importorskip("vllm.envs")\n', True),
        ("from headrace_engine.connector.loading import (\n    file_loader,\n)\n", True),
        ("from tests.support.stored import StoredEngine  # in an engine only\n", False),
        ("if TYPE_CHECKING:\n    from vllm import LLM\n", False),
        ('find("vllm.v1.worker.gpu_worker:Worker")\n', True),
        ("import vllm_other\n", False),
    ],
)
def test_it_is_known_which_files_of_tests_import_vllm(
    tmp_path: Path, source: str, found: bool
) -> None:
    (file := tmp_path / "test_it.py").write_text(source)
    assert imports(file, "vllm") is found


def part(name: str, cores: float = 1.0, gb: float = 1.0) -> Part:
    return Part(name, (), cores, gb)


class TestTheOrderOfParts:
    def test_a_part_waits_for_room(self) -> None:
        big, small = part("big", cores=2.0), part("small", cores=0.5)
        assert lanes.next_part([big, small], []) is big
        assert lanes.next_part([big, small], [part("other")]) is small
        assert lanes.next_part([big], [part("other")]) is None
        assert lanes.next_part([part("large", gb=15.0)], [part("other", gb=6.0)]) is None

    def test_what_never_has_room_runs_alone(self) -> None:
        assert lanes.next_part([alone := part("alone", cores=9.0, gb=99.0)], []) is alone

    def test_parts_begin_in_their_order_and_each_ends_once(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        parts = [part(str(n), cores=1.3) for n in (2, 5, 3)]
        begun: list[str] = []

        def test(one: Part) -> int:
            begun.append(one.name)
            return int(one.name)

        assert sorted(lanes.run_all(parts, test)) == [2, 3, 5]
        assert begun == ["2", "5", "3"]
        assert capsys.readouterr().out.count("ended with status") == 3


class TestALoopOfOneTest:
    def test_counts_what_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(flaky, "KEPT", tmp_path / "flaky")
        statuses = iter([0, 1, 0])

        def run_once(test: str, log: Path) -> int:
            log.write_text(f"said of {test}")
            return next(statuses)

        monkeypatch.setattr(flaky, "run", run_once)
        assert flaky.main(["tests/x.py", "3"]) == 1
        said = capsys.readouterr().out
        assert "said of tests/x.py" in said and "2 of 3 passed" in said
        assert [file.name for file in (tmp_path / "flaky").iterdir()] == ["2.log"]

    @pytest.mark.parametrize(
        "arguments", [[], ["a", "0"], ["a", "-1"], ["a", "b"], ["a", "1", "c"]]
    )
    def test_says_how_it_is_used(self, arguments: list[str]) -> None:
        assert flaky.main(arguments) == 2


def test_processes_of_the_tests_look_for_garbage_seldom() -> None:
    said = [sys.executable, "-c", "import gc; print(gc.get_threshold())"]
    done = subprocess.run(said, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(gc.get_threshold()) == "(50000, 10, 10)"


class TestTheFolderOfCompiledCode:
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        (tmp_path / "p").mkdir()
        (tmp_path / "p" / "caller.py").write_text("from p.callee import f\njit\n")
        (tmp_path / "p" / "callee.py").write_text("from p import sizes\n")
        (tmp_path / "p" / "sizes.py").write_text("N = 1\n")
        (tmp_path / "p" / "other.py").write_text("from p.caller import g\n")
        return tmp_path

    @pytest.mark.parametrize("changed", ["caller", "callee", "sizes"])
    def test_is_another_when_anything_that_is_compiled_changes(
        self, tree: Path, changed: str
    ) -> None:
        before = digest([tree])
        with (tree / "p" / f"{changed}.py").open("a") as file:
            file.write("M = 2\n")
        assert digest([tree]) != before

    def test_is_the_same_when_something_else_changes(self, tree: Path) -> None:
        before = digest([tree])
        (tree / "p" / "other.py").write_text("")
        os.utime(tree / "p" / "caller.py", (1, 1))
        assert digest([tree]) == before

    def test_is_where_this_process_keeps_its_code(self) -> None:
        assert Path(os.environ["NUMBA_CACHE_DIR"]).name == digest()


class TestATruth:
    def test_what_is_kept_needs_no_engine(self) -> None:
        def compute(prompts: object) -> list[list[int]]:
            raise AssertionError("an engine was started")

        truth = Truth([[1], [2]], [[10], [20]], compute)
        assert truth.differences([[2], [1]], [[20], [10]]) == []

    def test_an_engine_here_decides_on_what_differs_once(self) -> None:
        asked = []

        def compute(prompts: object) -> list[list[int]]:
            asked.append(prompts)
            return [[11]]

        truth = Truth([[1], [2]], [[10], [20]], compute)
        assert truth.differences([[1], [2]], [[11], [20]]) == []
        assert truth.differences([[1]], [[12]]) == ["1 tokens: [12] != [11]"]
        assert asked == [[[1]]]

    def test_without_kept_answers_an_engine_decides_on_all(self) -> None:
        truth = Truth([[1], [2]], None, lambda prompts: [[7] for _ in prompts])
        assert truth.differences([[1], [2]], [[7], [8]]) == ["1 tokens: [8] != [7]"]

    def test_answers_of_another_model_engine_or_prompts_are_not_used(self, tmp_path: Path) -> None:
        file = tmp_path / "answers.json"
        assert kept_answers({"vllm": "1"}, file) is None
        file.write_text('{"key": {"vllm": "1"}, "answers": [[1]]}')
        assert kept_answers({"vllm": "1"}, file) == [[1]]
        assert kept_answers({"vllm": "2"}, file) is None


class TestTheTinyLlama:
    def test_is_the_same_bytes_for_the_same_seed(self, tmp_path: Path) -> None:
        def sums(folder: Path) -> dict[str, str]:
            return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}

        again = sums(make_tiny_llama(tmp_path / "again"))
        assert again == sums(tiny_llama())
        other = sums(make_tiny_llama(tmp_path / "other", seed=1))
        assert {name for name in other if other[name] != again[name]} == {"model.safetensors"}

    def test_has_the_kv_that_it_says(self) -> None:
        weights = load_file(tiny_llama() / "model.safetensors")
        keys_and_values = [w for name, w in weights.items() if "k_proj" in name or "v_proj" in name]
        assert sum(w.shape[0] * w.itemsize for w in keys_and_values) == KV_BYTES_PER_TOKEN


def test_the_slowest_tests_come_first() -> None:
    costs = Costs(6.0, {"passed": 3}, [(1.0, "a", 9.0), (3.0, "c", 9.0), (2.0, "b", 9.0)])
    assert slowest(costs.tests) == [
        "the 3 slowest tests:",
        *("     3.0 s  c", "     2.0 s  b", "     1.0 s  a"),
    ]


def test_tests_over_their_budget_are_named() -> None:
    late = [(BUDGET_S + 1, "a", BUDGET_S), (SLOW_BUDGET_S - 1, "b", SLOW_BUDGET_S)]
    assert over_budget(late) == ["over budget: 11.0 s; may be 10: a"]

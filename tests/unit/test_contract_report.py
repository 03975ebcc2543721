"""`make contracts`: what pytest found in an environment of another vLLM, as a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import contracts

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.unit.test_contracts" name="test_a"/>
<testcase classname="tests.unit.test_contracts" name="test_b"><skipped/></testcase>
<testcase classname="tests.unit.test_contracts" name="test_c"><failure message="Failed: a | b is
 gone: mend engine/headrace_engine/vllm/engine.py">at tests/unit/test_contracts.py:7</failure>
</testcase>
<testcase classname="tests.unit.test_kv" name="test_d"><error message="TypeError: x">
kvstore/headrace_kvstore/arena/arena.py:7: in f
tests/unit/test_kv.py:3: in test_d</error></testcase>
<testcase classname="" name="tests.unit.test_e"><error message="collection failure">
decode/headrace_decode/server.py:9: in &lt;module&gt;
E   ImportError: no name x</error></testcase>
<testcase classname="tests.unit.test_kv" name="test_f"><error message=
"RuntimeError: Device string must not be empty">tests/unit/test_kv.py:8</error></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def outcome(tmp_path: Path) -> contracts.Outcome:
    file = tmp_path / "results.xml"
    file.write_text(RESULTS)
    return contracts.read_results(file)


def test_each_failure_leads_to_the_file_to_mend(outcome: contracts.Outcome) -> None:
    assert (outcome.passed, outcome.undecided) == (1, 1)
    assert [(each.test, each.files) for each in outcome.broken] == [
        ("tests/unit/test_contracts.py::test_c", ("engine/headrace_engine/vllm/engine.py",)),
        ("tests/unit/test_kv.py::test_d", ("kvstore/headrace_kvstore/arena/arena.py",)),
        ("tests/unit/test_e.py", ("decode/headrace_decode/server.py",)),
    ]
    assert outcome.broken[-1].why == "ImportError: no name x"


def test_the_page_has_a_row_for_each_and_says_if_the_app_was_not_tried(
    outcome: contracts.Outcome,
) -> None:
    page = contracts.report("0.33.0", {"Contracts": outcome}, runs_engines=False)
    test = "`unit/test_contracts.py::test_c`"
    row = "| `engine/headrace_engine/vllm/engine.py` | a \\| b is missing: mend engine/"
    assert row in page and test in page
    assert "1 tests passed, 3 failed." in page
    assert "has no CPU build, so the app was not tried" in page


def test_every_unit_test_that_imports_vllm_is_run() -> None:
    found = contracts.contract_files()
    assert {"tests/unit/test_contracts.py", "tests/unit/test_own_nixl.py"} <= set(found)
    assert "tests/unit/test_block_index.py" not in found

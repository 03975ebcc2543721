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
</testsuite></testsuites>"""


@pytest.fixture
def outcome(tmp_path: Path) -> contracts.Outcome:
    file = tmp_path / "results.xml"
    file.write_text(RESULTS)
    return contracts.read_results(file)


def test_each_failure_leads_to_the_file_to_mend(outcome: contracts.Outcome) -> None:
    assert outcome.passed == 1
    assert [(each.test, each.files) for each in outcome.broken] == [
        ("tests/unit/test_contracts.py::test_c", ("engine/headrace_engine/vllm/engine.py",)),
        ("tests/unit/test_kv.py::test_d", ("kvstore/headrace_kvstore/arena/arena.py",)),
    ]


def test_the_page_has_a_row_for_each_and_says_if_the_app_was_not_tried(
    outcome: contracts.Outcome,
) -> None:
    page = contracts.report("0.33.0", {"Contracts": outcome}, runs_engines=False)
    row = (
        "| `engine/headrace_engine/vllm/engine.py` | `unit/test_contracts.py::test_c` | a \\| b is"
    )
    assert row in page and "1 tests passed, 2 failed." in page
    assert "has no CPU build, so the app was not tried" in page


def test_every_unit_test_that_imports_vllm_is_run() -> None:
    found = contracts.contract_files()
    assert {"tests/unit/test_contracts.py", "tests/unit/test_own_nixl.py"} <= set(found)
    assert "tests/unit/test_block_index.py" not in found

"""`headrace keys`: a key is shown once, its hash is kept, and no change of the file is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config.key_file import read_keys
from headrace.gateway.ingress.api_keys import ApiKeys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["keys", *arguments])
    return int(ended.value.code or 0)


def test_an_added_key_opens_the_door_for_its_tenant(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("add", "ci", "-f", str(file), "--tenant", "shop", "--admin") == 0
    key = capsys.readouterr().out.strip()
    caller = ApiKeys(file=str(file)).caller(b"Bearer " + key.encode())
    assert (caller.name, caller.tenant, caller.role) == ("ci", "shop", "admin")
    assert key not in file.read_text()


def test_a_key_is_a_tenant_of_its_own_unless_told(file: Path) -> None:
    run("add", "ci", "-f", str(file))
    assert read_keys(file).keys[0].tenant == "ci"


def test_a_script_gets_the_key_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("add", "ci", "-f", str(file), "--json")
    made = json.loads(capsys.readouterr().out)
    caller = ApiKeys(file=str(file)).caller(b"Bearer " + made["key"].encode())
    assert caller.name == made["name"] == "ci" and "hash" not in made


def test_a_revoked_key_is_gone_and_the_others_stay(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        run("add", name, "-f", str(file), "--max-concurrent", "3")
    assert run("revoke", "one", "-f", str(file)) == 0
    capsys.readouterr()
    assert run("list", "-f", str(file), "--json") == 0
    (left,) = json.loads(capsys.readouterr().out)
    assert left == {
        "name": "two",
        "tenant": "two",
        "role": "user",
        "max_concurrent": 3,
        "requests_per_minute": None,
        "slo": None,
        "slo_classes": None,
        "models": None,
        "max_retention_s": None,
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "one"), "has a key named one"),
        (("add", "no spaces"), '"no spaces" cannot be the name of a key; use 1 to 64 letters'),
        (("revoke", "three"), "no key named three"),
        (("revoke", "one"), "the last key"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_and_loses_nothing(
    file: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("add", "one", "-f", str(file))
    before = file.read_bytes()
    capsys.readouterr()
    assert run(*arguments, "-f", str(file)) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and says in lines[0]
    assert file.read_bytes() == before


def test_a_file_that_cannot_be_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("list", "-f", str(tmp_path / "nowhere")) == 1
    assert "cannot read" in capsys.readouterr().err


def test_keys_added_at_once_are_all_kept(file: Path) -> None:
    from headrace.cli import keys

    def add(number: int) -> None:
        keys.add(
            file,
            name=f"key-{number}",
            tenant=None,
            role="user",
            max_concurrent=None,
            requests_per_minute=None,
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(12)))
    assert {each.name for each in read_keys(file).keys} == {f"key-{n}" for n in range(12)}


def test_a_key_can_have_a_longest_retention_of_its_own(file: Path) -> None:
    assert run("add", "agents", "-f", str(file), "--max-retention-s", "86400") == 0
    assert run("add", "none", "-f", str(file), "--max-retention-s", "0") == 0
    assert run("add", "long", "-f", str(file), "--max-retention-s", "86401") == 2
    assert [each.max_retention_s for each in read_keys(file).keys] == [86_400, 0]


def test_a_key_can_be_limited_to_models_and_the_list_shows_it(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("add", "all", "-f", str(file))
    run("list", "-f", str(file))
    assert "models" not in capsys.readouterr().out
    assert run("add", "shop", "-f", str(file), "--model", "chat", "--model", "org/small") == 0
    assert read_keys(file).keys[1].models == ["chat", "org/small"]
    capsys.readouterr()
    run("list", "-f", str(file))
    assert "chat, org/small" in capsys.readouterr().out

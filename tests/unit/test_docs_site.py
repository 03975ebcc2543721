"""The documentation site: links work in the repository and on the site, generated pages are
current."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs_pages import LINK, site_link

ROOT = Path(__file__).parents[2]


def test_the_site_builds_and_no_link_is_broken(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()


def test_the_page_of_commands_is_current() -> None:
    command = "-m typer headrace.cli.main utils docs --name headrace --title Commands"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert page.strip() == done.stdout.strip(), "run: make docs"


@pytest.mark.parametrize(
    ("link", "source", "page", "on_the_site"),
    [
        ("docs/kvstore.md", "README.md", "index.md", "kvstore.md"),
        ("CHANGELOG.md", "README.md", "index.md", "changelog.md"),
        ("../README.md", "docs/kvstore.md", "kvstore.md", "index.md"),
        ("../../CONTRIBUTING.md", "docs/a/b.md", "a/b.md", "../contributing.md"),
        ("architecture.md", "docs/kvstore.md", "kvstore.md", "architecture.md"),
        ("img/graph.png", "docs/kvstore.md", "kvstore.md", "img/graph.png"),
        ("../Makefile", "docs/kvstore.md", "kvstore.md", "../Makefile"),
    ],
)
def test_a_link_between_files_becomes_one_between_pages(
    link: str, source: str, page: str, on_the_site: str
) -> None:
    assert site_link(link, source, page) == on_the_site


def test_only_links_to_files_are_rewritten() -> None:
    text = "[a](#here) [b](https://example.org/x.md) [c](d.md#e)"
    assert [match[1] for match in LINK.finditer(text)] == ["d.md"]


def test_the_tests_that_the_security_page_names_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", page))
    assert len(named) >= 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []

"""The documentation site: links work in the repository and on the site, generated pages are
current."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from pydantic import ValidationError

from headrace.config import HeadraceConfig
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.settings.store_settings import StoreSettings
from scripts.docs_pages import LINK, site_link
from tests.support.browser import Browser

ROOT = Path(__file__).parents[2]
PAGES_OF_DOCS = sorted((ROOT / "docs").glob("*.md"))
SECTIONS = [
    *("Get started", "Guides", "Operate", "Concepts", "Reference"),
    *("Research and measurements", "Contribute"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    window = Browser(tmp_path_factory.mktemp("profile"))
    window.driver.set_window_size(1440, 1200)
    yield window
    window.close()


def test_the_site_builds_and_no_link_is_broken(site: Path) -> None:
    assert (site / "index.html").exists()


def test_no_list_table_or_fence_is_shown_as_its_source(site: Path) -> None:
    """Markdown that a repository's browser shows as a list may be one paragraph on the site."""
    shown = {}
    for page in sorted(site.glob("*.html")):
        html = page.read_text("utf-8")
        for paragraph in re.findall(r"<p>(.*?)</p>", html, re.DOTALL):
            text = re.sub(r"<code>.*?</code>|<[^>]+>", "~", paragraph, flags=re.DOTALL)
            if re.search(r"(?m)^\s*(\d+\. |[-*] |\||```|!!! )", text):
                shown[page.name] = text
    assert shown == {}


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    loaded = {
        f"{page.name}: {url}"
        for page in site.glob("*.html")
        for url in re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=.?(https?://[^\s\"'>]+)",
            page.read_text("utf-8"),
        )
    }
    assert loaded == set()


@pytest.mark.slow
def test_the_search_works_in_pages_that_are_read_as_files(site: Path, browser: Browser) -> None:
    browser.open((site / "index.html").as_uri())
    browser.type("input.md-search__input", "speculative decoding")
    found: list[str] = []
    deadline = time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        time.sleep(0.2)
        found = browser.run(
            "return [...document.querySelectorAll('.md-search-result__link')].map((a) => a.href)"
        )
    assert any("/speculation.html" in link for link in found)


@pytest.mark.slow
def test_no_table_or_code_is_cut_at_1440_pixels(site: Path, browser: Browser) -> None:
    """Of the first page, and of pages with wide tables."""
    cut = {}
    for name in ("index", "benchmarks", "comparison", "compression", "configuration"):
        page = site / f"{name}.html"
        browser.open(page.as_uri())
        wide = browser.run(
            "return [...document.querySelectorAll('.md-content table:not([class]),"
            " .md-content pre > code')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
            ".map((e) => e.textContent.trim().slice(0, 60))"
        )
        if wide:
            cut[page.name] = wide
    assert cut == {}


def test_a_page_begins_with_a_sentence() -> None:
    """A page says first what it does for the reader: no table, list, code or picture."""
    others = []
    for page in PAGES_OF_DOCS:
        text = re.sub(r"<!--.*?-->", "", page.read_text("utf-8"), flags=re.DOTALL)
        first = text.strip().partition("\n")[2].strip()
        if not re.match(r"[A-Z`*\[]", first) or first.startswith("* "):
            others.append(page.name)
    assert others == []


def test_no_page_has_a_placeholder_or_installs_from_an_index() -> None:
    """Headrace is on no package index."""
    wrong = re.compile(
        r"pip install '?headrace\b|\bTODO\b|\bTBD\b|No run has been kept|full length yet"
        r"|not measured yet"
    )
    found = [
        f"{page.name}: {hit[0]}"
        for page in (*PAGES_OF_DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for hit in wrong.finditer(page.read_text("utf-8"))
    ]
    assert found == []


def test_each_picture_is_on_a_page() -> None:
    pages = "".join(p.read_text("utf-8") for p in (*PAGES_OF_DOCS, ROOT / "README.md"))
    pictures = [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".png", ".svg")]
    assert [p.name for p in pictures if f"img/{p.name})" not in pages] == []


def test_the_first_page_takes_five_minutes() -> None:
    """At 200 words a minute, with time for the picture and the tables."""
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 700


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


def test_the_tests_that_the_page_of_faults_names_exist() -> None:
    page = (ROOT / "docs" / "tested-faults.md").read_text("utf-8")
    named = set(re.findall(r"`((?:tests/\w+/)?test_\w+\.py)`", page))
    assert len(named) >= 50
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in sorted(named) if not any(t.endswith(name) for t in tests)] == []


def test_a_page_outside_of_reference_and_research_has_at_most_2500_words() -> None:
    """As `wc -w` counts them. Contribute ends with the changelog, which is a list."""
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    sections = re.findall(r"(?m)^  - ([A-Z][^:\n]*):\n((?:      - .*\n)+)", config)
    assert [name for name, _ in sections] == SECTIONS
    long = {}
    for name, pages in sections:
        if name in ("Reference", "Research and measurements"):
            continue
        for page in re.findall(r"([\w-]+\.md)$", pages, re.MULTILINE):
            path = ROOT / "docs" / page
            if path.exists() and (words := len(path.read_text("utf-8").split())) > 2500:
                long[page] = words
    assert long == {}


def test_examples_of_the_configuration_are_valid() -> None:
    """Of all pages; files that they name need not exist."""
    wrong, examples = {}, 0
    for page in (*PAGES_OF_DOCS, ROOT / "README.md"):
        text = page.read_text("utf-8")
        for found in re.finditer(r"(?m)^( *)```yaml\n((?s:.*?))^\1```", text):
            values = yaml.safe_load(dedent(found[2]))
            if values.keys() & {"applications", "deployment_config", "keys"}:
                continue  # of Ray Serve, and a key file
            if page.name.startswith("kubernetes"):
                continue  # values of the chart: test_chart_guides
            examples += 1
            try:
                HeadraceConfig.model_validate(values)
            except ValidationError as error:
                wrong[f"{page.name}: {found[2]}"] = str(error)
    assert wrong == {}
    assert examples >= 20


def test_the_page_of_the_store_alone_lists_all_settings() -> None:
    page = (ROOT / "docs" / "kvstore-vllm.md").read_text("utf-8")
    fields = {*StoreSettings.model_fields, *NodeSettings.model_fields}
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []

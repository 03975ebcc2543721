"""Pages of the documentation site that are not in docs/: README, CONTRIBUTING and CHANGELOG.

Links are written for the repository, from one file to another. This hook of mkdocs turns each into
a link between pages of the site. A link to a file that is no page stays as it is, and
`mkdocs build --strict` then fails.
"""

import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of one page."""
    target = page.file.src_uri
    source = next((s for s, p in PAGES.items() if p == target), f"docs/{target}")
    return LINK.sub(lambda link: site_link(link[1], source, target), markdown)


def site_link(link: str, source: str, target: str) -> str:
    """A link between two pages, from a link between two files of the repository.

    Args:
        link: relative to the folder of `source`.
        source: the file that holds the link.
        target: the page that is made from that file.
    """
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    page = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
    return link if page is None else posixpath.relpath(page, posixpath.dirname(target) or ".")

"""Writes the generated files: `python -m scripts.generate`."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # vLLM logs to the standard output

from scripts.generate import chart, configuration_page, rest_page, support_page
from scripts.generate.dashboards.files import files as dashboards

ROOT = Path(__file__).parents[2]


def files() -> dict[str, str]:
    """Return the texts of the files, by path in the repository."""
    of_chart = chart.files() | {f"files/{name}": text for name, text in dashboards().items()}
    return {
        "docs/configuration.md": configuration_page.render(),
        "docs/rest.md": rest_page.page(),
        "docs/support.md": support_page.page(),
        **{f"helm/headrace/{name}": text for name, text in of_chart.items()},
    }


if __name__ == "__main__":
    for name, text in files().items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(name)

"""Writes the chart's files: `python -m headrace.observability.dashboards [DIR]`."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.observability.dashboards.files import CHART_FILES, files

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else CHART_FILES
    for name, text in files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        print(folder / name)

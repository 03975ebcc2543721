"""Finds the Helm chart that came with this installation."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

MARK = "helm/headrace/Chart.yaml"


def chart_folder() -> Path:
    """Return the folder of the chart: of the repository, or of the installed package.

    Raises:
        FileNotFoundError: this installation has no chart.
    """
    in_repository = Path(__file__).resolve().parents[2] / MARK
    if in_repository.is_file():
        return in_repository.parent
    try:
        installed = [file for file in files("headrace") or () if str(file).endswith(MARK)]
    except PackageNotFoundError:
        installed = []
    for file in installed:
        found = Path(str(file.locate())).resolve()
        if found.is_file():
            return found.parent
    raise FileNotFoundError(f"this installation has no {MARK}")

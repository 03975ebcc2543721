"""NVIDIA's kvpress on a context, in an environment of its own: it needs another transformers.

`pressing.py` runs there. Token ids go in and log-probabilities come back, as arrays in npz files.
Its rows are judged by its own exact model, which computes what ours computes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.longcontext.judge import Row, judge, judged_rows
from benchmarks.longcontext.texts import Case

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "kvpress"
LOCK = ROOT / "requirements" / "kvpress.lock"
STAMP = ".installed-kvpress"


def environment() -> Path:
    """kvpress's Python. The first call installs it: about a gigabyte."""
    if not (VENV / STAMP).exists():
        install = [sys.executable, str(ROOT / "scripts" / "install.py"), "--only-lock"]
        places = ["--venv", str(VENV), "--lock", str(LOCK), "--stamp", str(VENV / STAMP)]
        subprocess.run([*install, *places], check=True)
    return VENV / "bin" / "python"


def pressed(folder: str, case: Case, shares: tuple[float, ...]) -> list[Row]:
    """Return a row of each press at each share."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "input.npz"
        np.savez(
            source,
            tokens=np.array(case.tokens),
            first=case.first,
            judged=judged_rows(case).numpy(),
            shares=np.array(shares),
        )
        program = Path(__file__).with_name("pressing.py")
        subprocess.run(
            [str(environment()), str(program), folder, str(source), place], env=env, check=True
        )
        exact, _ = _read(Path(place) / "exact at 1.npz")
        rows = []
        for file in sorted(Path(place).glob("* at *.npz")):
            name, _, share = file.stem.rpartition(" at ")
            if name != "exact":
                found, kept = _read(file)
                rows.append(judge(case, f"kvpress {name}", float(share), kept, exact, found))
        return rows


def _read(file: Path) -> tuple[torch.Tensor, float]:
    with np.load(file) as found:
        return torch.from_numpy(found["logp"]), float(found["kept"])

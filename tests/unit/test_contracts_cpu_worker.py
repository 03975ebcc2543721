"""A CPU worker of vLLM starts beside numba, which our plugin has to allow."""

from __future__ import annotations

import subprocess
import sys


def test_a_cpu_workers_scan_of_modules_ends_at_numbas_without_our_plugin() -> None:
    """Where this fails, vLLM's scan or llvmlite is mended, and the plugin can go."""
    scan = (
        "from numba import njit; from vllm.platforms import current_platform\n"
        "from headrace_engine.vllm.platforms import let_scan_pass\n"
        "try:\n    current_platform.register_triton_kernel_overrides()\n"
        "except AttributeError: print('ended')\n"
        "let_scan_pass(); current_platform.register_triton_kernel_overrides(); print('passed')"
    )
    said = subprocess.run([sys.executable, "-c", scan], capture_output=True, text=True, timeout=120)
    assert said.stdout.split() == ["ended", "passed"], said.stderr[-2000:]

"""Properties of this machine's CPU that decide defaults."""

from __future__ import annotations

from pathlib import Path


def cpu_computes_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether this machine's CPU multiplies bfloat16 itself (AVX-512 BF16, AMX, or Arm's BF16).

    Without it, every product is converted in software: SmolLM2 then prefills about 4 times slower
    than in float32 (docs/benchmarks.md), so such a machine should serve in float32.
    """
    try:
        flags = Path(cpuinfo).read_text("utf-8", errors="replace").split()
    except OSError:
        return True
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)

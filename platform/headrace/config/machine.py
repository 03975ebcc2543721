"""What this machine's CPU is good at, where that decides a default."""

from __future__ import annotations

from pathlib import Path


def cpu_computes_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether this machine's CPU multiplies bfloat16 itself (AVX-512 BF16, AMX, or Arm's BF16).

    Where it does not, every product is widened in software: SmolLM2 then prefills about 4 times
    slower than in float32 (docs/benchmarks.md), so float32 is what such a machine should serve in.
    """
    try:
        flags = Path(cpuinfo).read_text("utf-8", errors="replace").split()
    except OSError:
        return True
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)

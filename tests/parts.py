"""What is tested in one process, and what that needs of the machine.

The needs are estimates of a part alone on a quiet machine, and only set how many run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """What is tested in one process.

    Attributes:
        cores: that it keeps busy on average.
        gb: of memory that it takes at most, with its engines.
        interpreted: whether Triton's interpreter runs its kernels. It has to know that before it is
            imported, so this part is not forked from a process that has imported vLLM.
    """

    name: str
    files: tuple[Path, ...]
    cores: float
    gb: float
    interpreted: bool = False


def files(folder: str) -> list[Path]:
    return sorted((TESTS / folder).glob("test_*.py"))


def taken(found: list[Path], *names: str) -> tuple[Path, ...]:
    """Take files out of a list, by name."""
    wanted = [next(file for file in found if file.stem == f"test_{name}") for name in names]
    for file in wanted:
        found.remove(file)
    return tuple(wanted)


def dealt(name: str, found: list[Path], pieces: int, cores: float, gb: float) -> list[Part]:
    """Divide what is left of a folder, so that neighbours, which cost alike, go apart."""
    return [Part(f"{name}-{n + 1}", tuple(found[n::pieces]), cores, gb) for n in range(pieces)]


APPS, UNIT, INTEGRATION = files("e2e"), files("unit"), files("integration")
SERVED = taken(APPS, "sparse", "placing", "scaling", "keys")
RAY = taken(UNIT, "cli_up", "cli_cluster", "cli_reap")
INTERPRETED = taken(UNIT, "kv_device_kernels", "sparse_kernels", "sparse_device", "fusion_device")
INTERPRETED_TOO = taken(files("unit"), "kv_ways", "kv_layout_vllm")
"""Have tests of either kind."""
SIMULATED = taken(UNIT, "admission_simulated", "cli_calibrate")
REST = taken(INTEGRATION, "rest_bytes", "ipv6_only", "hostile_grammars", "nixl_sleeps")
CHANGES = taken(INTEGRATION, "kv_changes_engine", "unsupported_engine")

PARTS = [
    Part("app", tuple(APPS), 0.9, 12.0),
    Part("served", SERVED, 1.4, 9.0),
    Part("simulated", SIMULATED, 0.7, 2.0),  # others find its kernels compiled
    *dealt("engines", INTEGRATION, 2, 0.8, 5.5),
    Part("ray", RAY, 0.4, 2.0),
    Part("changes", CHANGES, 0.8, 5.5),
    *dealt("unit", UNIT, 2, 0.4, 3.0),
    Part("rest", REST, 0.7, 4.0),
    Part("interpreted", (*INTERPRETED, *INTERPRETED_TOO), 0.9, 2.5, interpreted=True),
    Part("property", tuple(files("property")), 0.8, 1.0),
]
"""In the order in which they begin, where there is room."""
CHECK = [*dealt("unit", files("unit"), 2, 0.6, 3.0), PARTS[-1]]

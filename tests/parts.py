"""What is tested in one process, and what that needs of the machine.

The needs are estimates of a part alone on a quiet machine, and only set how many run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.imported import imports

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """What is tested in one process.

    Attributes:
        cores: that it keeps busy on average.
        gb: of memory that it takes at most, with its engines.
    """

    name: str
    files: tuple[Path, ...]
    cores: float
    gb: float


def files(folder: str) -> list[Path]:
    return sorted((TESTS / folder).glob("test_*.py"))


def taken(found: list[Path], *names: str) -> tuple[Path, ...]:
    """Take files out of a list, by name."""
    wanted = [next(file for file in found if file.stem == f"test_{name}") for name in names]
    for file in wanted:
        found.remove(file)
    return tuple(wanted)


def needing_vllm(found: list[Path]) -> tuple[Path, ...]:
    """Take those out of a list that import vLLM, which costs a process ten seconds of a core."""
    return taken(found, *(f.stem.removeprefix("test_") for f in found if imports(f, "vllm")))


APPS, INTEGRATION = files("e2e"), files("integration")
UNIT, PROPERTY = files("unit"), files("property")
MODELS = taken(APPS, "models")
ADAPTERS = taken(APPS, "adapters")
SERVED = taken(APPS, "sparse", "placement", "scaling", "keys")
RAY = taken(UNIT, "cli_up", "cli_cluster", "cli_process_matcher")
INTERPRETED = taken(
    UNIT,
    *("kv_device_kernels", "sparse_kernels", "sparse_device", "cross_layer_device"),
    *("compression_device", "page_residency", "sparse_device_offload"),
)
KERNELS = [
    taken(
        UNIT,
        *("admission_simulated", "block_index", "pending_blocks", "placement_policies"),
        *("kv_arena", "kv_arena_policy", "kv_policy", "kv_checksum", "kv_codec"),
    ),
    taken(
        UNIT,
        *("speculation_memory", "speculation_planner", "speculation_session", "blending_planner"),
        *("sparse_core", "sparse_offload", "sparse_rows", "sparse_page_summary_table"),
        "cli_calibrate",
    ),
]
REST = taken(INTEGRATION, "pod_policies", "ipv6_only", "nixl_sleeps")
UNIT_VLLM = (*needing_vllm(UNIT), *needing_vllm(PROPERTY))
ENGINES_VLLM = needing_vllm(INTEGRATION)

PARTS = [
    # Nothing else begins beside these two: all others find their kernels compiled.
    *(Part(f"kernels-{n + 1}", found, 1.1, 3.0) for n, found in enumerate(KERNELS)),
    Part("app", tuple(APPS), 0.9, 7.0),
    Part("engines-1", ENGINES_VLLM, 0.8, 5.5),
    Part("engines-2", (*INTEGRATION, *ADAPTERS), 0.8, 9.0),
    Part("ray", RAY, 0.4, 2.0),
    Part("served", SERVED, 1.0, 9.0),
    Part("models", MODELS, 0.9, 9.0),
    Part("unit-1", UNIT_VLLM, 0.6, 3.0),
    Part("unit-2", tuple(UNIT), 0.5, 3.0),
    Part("rest", REST, 0.7, 4.0),
    Part("interpreted", INTERPRETED, 0.8, 2.5),
    Part("property", tuple(PROPERTY), 0.8, 1.0),
]
"""In the order in which they begin, where there is room."""
CHECK = [
    Part("unit-1", UNIT_VLLM, 0.6, 3.0),
    Part("unit-2", (*RAY, *INTERPRETED, *KERNELS[0], *KERNELS[1], *UNIT), 0.8, 3.0),
    PARTS[-1],
]

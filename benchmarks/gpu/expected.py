"""Expected time of a load of KV from each tier on a GPU node, from data sheets, against computing.

    python -m benchmarks.gpu.expected

Nothing here is measured. Bandwidths are those of data sheets times `EFFICIENCY`, computing runs at
`UTILISATION` of the card's dense bfloat16 peak. `python -m benchmarks.gpu` measures the same on a
card. Llama 3 8B, tensor parallel on two GPUs, each with a bus of its own; disk and network are the
node's. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYERS, KV_HEADS, HEAD_DIM, WIDTH, ITEM_BYTES = 32, 8, 128, 4096, 2
LINEAR_PARAMETERS = 6.98e9
"""Parameters of the layers; the last layer's output is computed for one token."""
GPUS, BLOCK_TOKENS = 2, 16
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * ITEM_BYTES
"""Bytes of a token's KV, of all ranks together: 131,072."""
EFFICIENCY, UTILISATION = 0.85, 0.5
LAUNCH_S = 150e-6
"""Seconds of a layer's load on the host: addresses, one batch of copies, one kernel, one event. A
guess, from the CPU's times for the same calls of torch and numpy."""
CONTEXTS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Node:
    """Data-sheet bandwidths, bytes/s in one direction.

    Attributes:
        bus: of each GPU. disk, network: of the node.
        peak: dense bfloat16 FLOP/s of a GPU.
    """

    name: str
    bus: float
    disk: float
    network: float
    peak: float


NODES = (
    Node("H100, PCIe 5 x16", 63e9, 14e9, 50e9, 989e12),
    Node("GH200, NVLink-C2C", 450e9, 14e9, 50e9, 989e12),
)


def compute_s(tokens: int) -> float:
    """Return the seconds to compute a prompt from its first token on."""
    pairs = tokens * (tokens + 1) / 2
    flop = 2 * LINEAR_PARAMETERS * tokens + 4 * WIDTH * LAYERS * pairs
    return flop / (GPUS * UTILISATION * NODES[0].peak)


def load_s(node: Node, tier: str, tokens: int, launch_s: float = LAUNCH_S) -> float:
    """Seconds to load a prompt's KV: both ranks at once, copies under each other, the slowest link
    decides; launching runs ahead of copying, but for the first layer."""
    size = tokens * TOKEN_BYTES
    links = [size / GPUS / (node.bus * EFFICIENCY)]
    if tier == "nvme":
        links.append(size / (node.disk * EFFICIENCY))
    if tier == "peer":
        links.append(size / (node.network * EFFICIENCY))
    return max(*links, LAYERS * launch_s) + launch_s


def pays_from(node: Node, tier: str) -> int | None:
    """Return the shortest prompt, in blocks' tokens, that is loaded sooner than computed."""
    for tokens in range(BLOCK_TOKENS, CONTEXTS[-1] + 1, BLOCK_TOKENS):
        if load_s(node, tier, tokens) < compute_s(tokens):
            return tokens
    return None


def markdown() -> str:
    """Tables."""
    lines = ["| prompt | KV, MB | compute, ms | " + " | ".join(_heads()) + " |"]
    lines.append("|---:" * (3 + 3 * len(NODES)) + "|")
    for tokens in CONTEXTS:
        cells = [f"{tokens:,}", f"{tokens * TOKEN_BYTES / 1e6:,.0f}"]
        cells.append(f"{1e3 * compute_s(tokens):,.1f}")
        cells += [f"{1e3 * load_s(n, t, tokens):,.1f}" for n in NODES for t in TIERS]
        lines.append("| " + " | ".join(cells) + " |")
    pays = [str(pays_from(n, t) or "never") for n in NODES for t in TIERS]
    lines.append("| pays from | | | " + " | ".join(pays) + " |")
    return "\n".join(lines)


TIERS = ("dram", "nvme", "peer")


def _heads() -> list[str]:
    return [f"{node.name.split(',')[0]} {tier}, ms" for node in NODES for tier in TIERS]


if __name__ == "__main__":
    print(markdown())

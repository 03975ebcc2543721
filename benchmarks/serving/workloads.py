"""The three workloads, their prompts, and how much of each a run has.

A new prompt is drawn for each arm, repeat and request, so that an engine's prefix cache helps only
where the workload itself shares text: the system prompt and the history of a conversation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

OUTPUT_TOKENS = 32
ARMS = ("vllm", "vllm_x2", "ray_pd", "headrace")

# Each is one token of SmolLM2's with a space before it, so words in a prompt count as its tokens.
WORDS = tuple(
    """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea body information back
parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education good new first last long
great little own other old big high different small large next early young important few
public bad same able river stone light green blue road winter summer market paper music
north south east west king queen ship bird tree fire glass gold silver iron wood field
garden bridge island mountain ocean engine wheel train plane letter measure weight speed
sound color shape circle square corner center border valley forest desert storm cloud rain
snow wind sand grass leaf root seed fruit bread milk salt sugar coffee table chair
""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Workload:
    """One kind of request.

    `new_tokens` is the approximate number of tokens that a turn must prefill if all earlier text of
    its conversation is cached. It is only used to divide the run's time among cells.
    """

    name: str
    user_words: int
    system_words: int = 0
    turns: int = 1
    new_tokens: int = 0


@dataclass(frozen=True)
class Conversation:
    """One client's messages, turn by turn; `system` is None for the model's own default."""

    system: str | None
    users: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One row of the table: a workload at a concurrency, and how much of it one repeat asks."""

    workload: Workload
    concurrency: int
    conversations: int
    warmup: int

    @property
    def name(self) -> str:
        """Name of the cell in the figures' names, such as `short.c8`."""
        return f"{self.workload.name}.c{self.concurrency}"

    @property
    def requests(self) -> int:
        """Number of requests per repeat and arm."""
        return self.conversations * self.workload.turns


# The prompt's length in SmolLM2's tokens is the words and what its chat template adds: 30 with its
# default system prompt (50 and 2,000 in all), 10 per later turn (so 40 new beside the answer's 32).
WORKLOADS = {
    "short": Workload("short", user_words=20, new_tokens=50),
    "long": Workload("long", user_words=1970, new_tokens=2000),
    # Caches keep whole blocks of 128 tokens, so half a block of history is computed again as well.
    "shared": Workload("shared", user_words=31, system_words=990, turns=4, new_tokens=136),
}

# One short request before each repeat, not counted.
PRIMER = Cell(WORKLOADS["short"], concurrency=1, conversations=1, warmup=0)

# Conversations per client and repeat, by whether there is one client or more.
_QUICK = {"short": (4, 2), "long": (2, 1), "shared": (1, 1)}
_FULL = {"short": (10, 4), "long": (2, 1), "shared": (2, 1)}


def cells(names: Sequence[str], concurrencies: Sequence[int], *, quick: bool) -> list[Cell]:
    """Return the cells of a run, in order.

    Raises:
        KeyError: there is no workload of that name.
    """
    sizes = _QUICK if quick else _FULL
    out = []
    for name in names:
        workload = WORKLOADS[name]
        if quick:
            workload = replace(workload, turns=min(workload.turns, 3))
        for clients in concurrencies:
            each = sizes[name][0 if clients == 1 else 1]
            # A long prompt warms nothing that the first did not.
            warmup = clients if name != "long" else int(clients == concurrencies[0])
            out.append(Cell(workload, clients, each * clients, warmup))
    return out


def conversations(
    cell: Cell, count: int, *, turns: int | None = None, seed: int, scope: str
) -> list[Conversation]:
    """`count` conversations of a cell's workload.

    Args:
        cell: of which workload.
        count: how many.
        turns: of each; None is the workload's own number.
        seed: of the run: the shared system prompt depends on it alone.
        scope: what tells these prompts from all others of the run, such as arm and repeat.
    """
    workload = cell.workload
    system = None
    if workload.system_words:
        system = text(random.Random(f"{seed}/system"), workload.system_words)
    out = []
    for index in range(count):
        rng = random.Random(f"{seed}/{cell.name}/{scope}/{index}")
        users = (text(rng, workload.user_words) for _ in range(turns or workload.turns))
        out.append(Conversation(system, tuple(users)))
    return out


def text(rng: random.Random, words: int) -> str:
    """Return `words` random words; two texts agree on their first ten once in 10^23."""
    return " ".join(rng.choices(WORDS, k=words))


def predicted_s(
    cell: Cell, requests: int, *, step_s: float = 0.05, token_s: float = 0.0021
) -> float:
    """Return the rough seconds for `requests` requests of a cell on one engine.

    An engine step is taken to cost `step_s` and `token_s` for each token in it (measured with
    SmolLM2-135M in float32 on one thread). Only for sharing time out.
    """
    if requests == 0:
        return 0.0
    clients = min(cell.concurrency, requests)
    prefill_s = requests * (step_s + token_s * cell.workload.new_tokens)
    rounds = -(-requests // clients)
    return prefill_s + rounds * (OUTPUT_TOKENS - 1) * (step_s + token_s * clients)


def allowance_s(once_s: Sequence[float], left_s: float) -> float:
    """Return the seconds that the first of the remaining cells may use.

    Each cell gets at least one repeat. The remaining time is divided evenly, so cheap cells, whose
    times also vary most, have the most repeats.

    Args:
        once_s: predicted seconds of one repeat, for each remaining cell.
        left_s: remaining seconds of the whole run.
    """
    spare_s = left_s - sum(once_s)
    return once_s[0] + max(0.0, spare_s) / len(once_s)


def one_more(done: int, longest_s: float, spent_s: float, share_s: float, most: int) -> bool:
    """Return whether a cell gets another repeat: always a first, then while one more fits.

    Args:
        done: number of repeats so far.
        longest_s: seconds of the longest of them, all arms together.
        spent_s: seconds of its share that the cell has used, its warm-up included.
        share_s: its share in seconds.
        most: maximum number of repeats.
    """
    if done == 0:
        return True
    return done < most and spent_s + longest_s <= share_s


def rotated(arms: Sequence[str], by: int) -> list[str]:
    """Return the arms rotated by `by` places, so that each repeat begins with another arm."""
    by %= len(arms)
    return [*arms[by:], *arms[:by]]

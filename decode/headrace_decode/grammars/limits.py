"""Limits of a grammar's cost. A grammar over one of these limits is refused with 400.

The first four are checked on the event loop, in time linear in the sizes that they allow. The
others apply in the process that tries the grammar (`worker.run_confined`), since only a trial shows
a grammar's cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_BYTES = 256 * 1024
"""Maximum size of one grammar as text. A schema with 20,000 enumerated values has 200 KB."""
MAX_NESTING = 128
"""Maximum depth of nested objects and lists in a JSON schema; JSON encoders recurse."""
MAX_CHOICES = 16_384
MAX_COUNT = 999_999
"""Maximum count of items, characters or repetitions in a grammar: a thousand times as many took all
memory."""

COMPILE_CPU_S = 4
"""Processor seconds for checking, compiling and walking one grammar (whole seconds: RLIMIT_CPU).
With a vocabulary of 49,152, 20,000 enumerated values took 3.5 s; 1,000 alternatives took 35 s."""
COMPILE_WALL_S = 60.0
"""Seconds on the clock for the same work. At the pace below, `COMPILE_CPU_S` take 16 s on an idle
machine and 48 s beside two other trials. A trial that takes longer shows nothing about its
grammar."""
MAX_TRIALS, MAX_TENANT_TRIALS = 3, 2
"""Maximum number of trials at the same time, in all and of one tenant. A slow grammar thus delays
no other grammar, and two slow grammars of a tenant delay no other tenant. Each trial may add
`COMPILE_BYTES` of memory."""
FREE_S, RUN_S, REST_S = 0.2, 0.005, 0.015
"""Processor seconds for which a trial computes freely; after that, seconds for which it computes
and rests in turns. Grammars in use compile in 0.06 to 0.16 s. The turns are shorter than an
engine's step, so that no step has a trial beside it all the time. Several such trials rest longer:
together they compute as much as one."""
COMPILE_BYTES = 2**30
"""Maximum memory that one trial may add."""
ANSWER_BYTES = 8 * 2**20
"""Maximum size of a trial's answer, which is the grammar in the form that the engine gets."""
MASK_S = 0.025
"""Maximum processor seconds to compute the allowed tokens of one step. The engine computes them
between two steps of its whole batch, so all requests wait. Grammars in use need 0.1 to 12 ms,
ambiguous ones minutes."""
WALK_TOKENS = 256
"""Number of tokens for which a trial follows the grammar, along each of its walks."""


def too_large(spec: Mapping[str, Any]) -> str | None:
    """Return the size limit that a grammar exceeds, in words; None if it exceeds none.

    The check stops at the first limit.

    Args:
        spec: the fields of vLLM's `StructuredOutputsParams`.
    """
    choices = spec.get("choice")
    if choices and len(choices) > MAX_CHOICES:
        return f"choice has {len(choices)} entries; at most {MAX_CHOICES} are possible"
    size = 0
    level: list[Any] = list(spec.values())
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, Mapping):
                size += sum(map(len, value))
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                below.extend(value)
            size += 2
            if size > MAX_BYTES:
                return f"a grammar may have {MAX_BYTES} bytes; this one has more"
        level = below
        if not level:
            return None
    return f"a schema may be nested {MAX_NESTING} levels deep; this one is deeper"

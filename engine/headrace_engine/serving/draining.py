"""How a replica goes: it takes nothing new and finishes what it has, up to a grace.

Ray Serve stops a replica in this order: its controller tells every handle (`members`), the replica
waits until no call of a handle is under way, then its `__del__` runs, and after
`graceful_shutdown_timeout_s` it is killed. Requests over the replica's own port are no calls of a
handle, so `__del__` waits for them: as long as Serve lets it, less what ending the engine takes.
"""

from __future__ import annotations

ENGINE_END_S = 10.0
"""For an engine's processes to end, and their shared memory with them."""
WAIT_LOOP_S = 0.5
"""Default of `graceful_shutdown_wait_loop_s`. Serve's own, 2 s, is how long a replica that has no
calls goes on taking requests over its port."""


def drain_options(drain_s: float) -> dict[str, float]:
    """The deployment options that let a replica finish its requests for so many seconds."""
    return {
        "graceful_shutdown_timeout_s": drain_s + 2 * WAIT_LOOP_S + ENGINE_END_S,
        "graceful_shutdown_wait_loop_s": WAIT_LOOP_S,
    }


def grace_s(timeout_s: float, wait_loop_s: float) -> float:
    """Seconds that `__del__` may wait for requests.

    Args:
        timeout_s: the deployment's `graceful_shutdown_timeout_s`.
        wait_loop_s: its `graceful_shutdown_wait_loop_s`.
    """
    return max(0.0, timeout_s - 2 * wait_loop_s - ENGINE_END_S)

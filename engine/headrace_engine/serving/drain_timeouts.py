"""Times by which a replica drains: it takes no new requests and finishes its own, up to a limit.

Ray Serve stops a replica in this order: its controller tells every handle (`members`), the replica
waits until no call of a handle is under way, then its `__del__` runs, and after
`graceful_shutdown_timeout_s` it is killed. Requests over the replica's own port are no calls of a
handle, so `__del__` waits for them. It waits as long as Serve lets it, less the time to end the
engine.
"""

from __future__ import annotations

ENGINE_END_S = 10.0
"""Time for an engine's processes to end, and their shared memory with them."""
WAIT_LOOP_S = 0.5
"""Default of `graceful_shutdown_wait_loop_s`. A replica without calls still takes requests over its
port for this time; Serve's own default is 2 s."""


def drain_options(drain_s: float) -> dict[str, float]:
    """Return the deployment options that give a replica `drain_s` to finish its requests."""
    return {
        "graceful_shutdown_timeout_s": drain_s + 2 * WAIT_LOOP_S + ENGINE_END_S,
        "graceful_shutdown_wait_loop_s": WAIT_LOOP_S,
    }


def grace_s(timeout_s: float, wait_loop_s: float) -> float:
    """Return the seconds that `__del__` may wait for requests.

    Args:
        timeout_s: the deployment's `graceful_shutdown_timeout_s`.
        wait_loop_s: its `graceful_shutdown_wait_loop_s`.
    """
    return max(0.0, timeout_s - 2 * wait_loop_s - ENGINE_END_S)

"""Keeps vLLM's NIXL connector from using the cores of a CPU engine while no KV moves.

vLLM's connector takes two things from the cores of a CPU engine:

- NIXL's progress thread polls without a pause and keeps one core busy. The thread is built to
  sleep in poll() until UCX reports an event, but NIXL's Python agent sets that call's time-out
  (`pthrDelay`) to 0. Here the agent is made again with a time-out, before anything is registered
  with it.
- The thread that computes is moved to the last core of each NUMA node, so all engines of a machine
  share one core. Here it gets its cores back.

A GPU engine keeps vLLM's agent: there a polling thread has a core to itself.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger("headrace.engine")

LONGEST_SLEEP_US = 10_000
"""NIXL's source warns that UCX misses an event on some file descriptors; none was missed over
shared memory or TCP. A missed event costs a transfer this much. Waking so often costs 0.3 % of a
core."""


def limit_cpu_usage(worker: Any, cores: set[int]) -> None:
    """Have a connector's worker side, with which nothing is registered yet, keep no core busy.

    Args:
        worker: `NixlPullConnectorWorker` of a CPU engine.
        cores: cores that its thread had before the worker was made.
    """
    os.sched_setaffinity(0, cores)
    try:
        worker.nixl_wrapper = event_driven(worker.nixl_wrapper)
    except Exception:
        logger.exception("NIXL's progress thread stays as it is and keeps one core busy")


def event_driven(agent: Any) -> Any:
    """Return a NIXL agent with the name and backends of `agent` whose progress thread sleeps.

    Args:
        agent: a `nixl_agent` with which nothing is registered yet.

    Raises:
        AttributeError, TypeError: NIXL's Python API differs from that of version 1.3.
        RuntimeError: NIXL cannot make the agent.
    """
    from nixl import _api, _bindings

    config = _bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = LONGEST_SLEEP_US
    config.captureTelemetry = True  # vLLM asks for the telemetry of each transfer
    made = _api.nixl_agent(agent.name, _api.nixl_agent_config(backends=[]))
    made.agent = _bindings.nixlAgent(agent.name, config)
    for backend, options in agent.backend_options.items():
        made.create_backend(backend, options)
    return made

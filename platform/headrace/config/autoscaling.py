"""The section `autoscaling`, and the bounds of a role's number of replicas."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from headrace.config.section import Section

POLICY = "headrace.autoscaling.serve_policy:AutoscalingPolicy"
TARGET_ONGOING_REQUESTS = {"prefill": 2.0, "decode": 16.0}
"""Requests of a replica for Serve's own policy, until enough has been measured for ours."""


class RoleAutoscaling(Section):
    """Bounds of a role's number of replicas, which then follows the load. Left out: the
    number is `replicas`, always."""

    min_replicas: int = Field(
        default=1,
        ge=0,
        description="Minimum number of replicas. 0 for decode: all stop when no request is "
        "expected, and the next request waits until one has started. 0 for prefill: all stop while "
        "decode replicas compute all prompts in time.",
    )
    max_replicas: int = Field(
        ge=1,
        description="Maximum number of replicas. Ray must have the resources for them.",
    )

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas: is {self.max_replicas}, below min_replicas {self.min_replicas}"
            )
        return self

    def within(self, replicas: int) -> int:
        """Return the nearest number that is allowed."""
        return min(max(replicas, self.min_replicas), self.max_replicas)


class AutoscalingTargets(Section):
    """Latency targets for roles with `autoscaling`: the number of replicas is the smallest that
    meets them (docs/autoscaling.md)."""

    ttft_s: float = Field(
        default=2.0, gt=0, description="Target for the time to first token, in seconds."
    )
    ttft_token_ms: float = Field(
        default=0.1, ge=0, description="Added to `ttft_s` for each prompt token, in milliseconds."
    )
    itl_s: float = Field(
        default=0.05, gt=0, description="Target for the mean inter-token latency, in seconds."
    )
    slo_attainment: float = Field(
        default=0.95,
        gt=0,
        lt=1,
        description="Part of the requests that should meet both targets. More takes more replicas.",
    )
    start_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds that a replica takes to start, until it has been measured. Replicas "
        "are started that much ahead.",
    )

    def serve_config(
        self, role: str, replicas: int, bounds: dict[str, tuple[int, int]], model: str = ""
    ) -> dict[str, Any]:
        """Return Serve's `autoscaling_config` of a role.

        Args:
            replicas: initial number. bounds: minimum and maximum number of replicas of each role.
            model: the model's name in `models`; empty if it is the only one.
        """
        minimum, maximum = bounds[role]
        return {
            "min_replicas": minimum,
            "max_replicas": maximum,
            "initial_replicas": replicas,
            "target_ongoing_requests": TARGET_ONGOING_REQUESTS[role],
            # The policy itself knows when a change pays.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {
                "policy_function": POLICY,
                "policy_kwargs": {
                    "role": role,
                    **({"model": model} if model else {}),
                    **{name: list(both) for name, both in bounds.items()},
                    "ttft_s": self.ttft_s,
                    "ttft_token_s": self.ttft_token_ms / 1e3,
                    "itl_s": self.itl_s,
                    "slo_attainment": self.slo_attainment,
                    "start_s": self.start_s,
                },
            },
        }

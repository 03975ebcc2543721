"""The fields about the number of replicas: bounds of a role, and the targets for the number."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from headrace.config.section import Section

POLICY = "headrace.autoscaling.policy:ElasticPolicy"
QUEUES = {"prefill": 2.0, "decode": 16.0}
"""Requests of a replica at which Serve's policy aims, while too little is known for ours."""


class RoleScaling(Section):
    """Bounds of a role's number of replicas, which then follows the load. Left out: the number is
    `replicas`, always."""

    min_replicas: int = Field(
        default=1,
        ge=0,
        description="Fewest replicas. 0 for decode: all stop when no request is expected, and the "
        "next one waits for a start. 0 for prefill: there is none while decode replicas compute "
        "all prompts in time.",
    )
    max_replicas: int = Field(
        ge=1, description="Most replicas. Ray must be able to give them what they reserve."
    )

    @model_validator(mode="after")
    def _least_and_most(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas: is {self.max_replicas}, below min_replicas {self.min_replicas}"
            )
        return self

    def within(self, replicas: int) -> int:
        """Return the nearest number that is allowed."""
        return min(max(replicas, self.min_replicas), self.max_replicas)


class ElasticitySettings(Section):
    """Targets that the number of replicas must keep, where a role has `autoscaling`.
    docs/elasticity.md says how it is chosen."""

    ttft_s: float = Field(
        default=2.0, gt=0, description="Target for the time to first token, in seconds."
    )
    ttft_token_ms: float = Field(
        default=0.1, ge=0, description="Added to `ttft_s` for each prompt token, in milliseconds."
    )
    itl_s: float = Field(
        default=0.05, gt=0, description="Target for the mean seconds a token after the first."
    )
    share: float = Field(
        default=0.95,
        gt=0,
        lt=1,
        description="Share of the requests that should keep both. More takes more replicas.",
    )
    start_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds that a replica takes to start, until some have been measured: "
        "replicas are ordered that much ahead.",
    )

    def autoscaling(
        self, role: str, replicas: int, bounds: dict[str, tuple[int, int]]
    ) -> dict[str, Any]:
        """Serve's `autoscaling_config` of a role.

        Args:
            replicas: to begin with. bounds: fewest and most replicas of each role.
        """
        least, most = bounds[role]
        return {
            "min_replicas": least,
            "max_replicas": most,
            "initial_replicas": replicas,
            "target_ongoing_requests": QUEUES[role],
            # The policy itself knows when a change pays.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {
                "policy_function": POLICY,
                "policy_kwargs": {
                    "role": role,
                    **{name: list(both) for name, both in bounds.items()},
                    "ttft_s": self.ttft_s,
                    "ttft_token_s": self.ttft_token_ms / 1e3,
                    "itl_s": self.itl_s,
                    "share": self.share,
                    "start_s": self.start_s,
                },
            },
        }

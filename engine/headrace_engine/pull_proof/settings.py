"""Settings of pulls: the transfers that are checked byte for byte, and the time-outs.

kv_connector_extra_config: {headrace_integrity: {check: sampled, rate: 0.02}}
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headrace_engine.kv_transfer.compatibility import CHECKS_KEY

Check = Literal["sampled", "all", "off"]


@dataclass(frozen=True, slots=True)
class IntegritySettings:
    """Settings of one engine.

    Attributes:
        check: which of its hand-outs have fingerprints.
        rate: fraction of hand-outs with fingerprints if `check` is `sampled`, above 0 and at most
            1.
        pull_timeout_s: maximum time for the bytes to arrive. Then the engine gives up the
            connection, which ends its pulls.
        proof_timeout_s: maximum time from the arrival of the bytes to their proof.

    Raises:
        ValueError: a value is impossible.
    """

    check: Check = "sampled"
    rate: float = 0.02
    pull_timeout_s: float = 60.0
    proof_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.check not in get_args(Check):
            raise ValueError(f'integrity.check: is "{self.check}"; give sampled, all or off')
        if not 0 < self.rate <= 1:
            raise ValueError(f"integrity.rate: is {self.rate}; give a share above 0, at most 1")
        for name in ("pull_timeout_s", "proof_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"integrity.{name}: is {getattr(self, name)}; give seconds")

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> IntegritySettings:
        """Read `kv_connector_extra_config`. Raises ValueError if its settings cannot be used."""
        given = extra_config.get(CHECKS_KEY) or {}
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"{CHECKS_KEY}: {error}") from None


@dataclass(slots=True)
class Sampling:
    """Draws the hand-outs that are checked.

    A puller that distrusts a peer demands the check. The sample is drawn at random, not counted, so
    that no pattern of requests escapes it.
    """

    settings: IntegritySettings
    possible: bool = True
    """Whether fingerprints of this engine's cache can be made."""
    _draw: random.Random = field(default_factory=random.Random)

    def choose(self, demanded: bool) -> bool:
        """Whether the next hand-out is checked."""
        if not self.possible:
            return False
        if demanded or self.settings.check == "all":
            return True
        return self.settings.check == "sampled" and self._draw.random() < self.settings.rate

"""Online cost models, in seconds, fitted to this cluster's measurements.

Each model has a weak prior: it predicts from the first request on, and after a few dozen samples
the prior no longer matters. No I/O, no clocks, no locks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace_engine.step_time import StepTime
from headrace_kvstore.least_squares import LinearTime, RecursiveLeastSquares

PRIOR_STD_S = 0.05
"""Standard deviation of an overhead before it is measured."""


class OverheadModel:
    """A fixed overhead in seconds: exponentially decaying mean of about 20 samples.

    It models the costs of a remote prefill other than its own queue and computation: the call
    (``call_s - queue_s - compute_s``), the hand-over of the KV, and the wait that other routers'
    requests cause. Samples are differences and may be negative; ``seconds`` is never below 0.
    ``rms_error`` is in seconds.
    """

    def __init__(self, prior_s: float) -> None:
        self._fit = RecursiveLeastSquares(
            mean=(prior_s,), std=(PRIOR_STD_S,), error=PRIOR_STD_S, forgetting=0.95
        )

    @property
    def samples(self) -> int:
        return self._fit.samples

    @property
    def rms_error(self) -> float:
        return self._fit.rms_error

    def seconds(self) -> float:
        return self._fit.nonnegative()[0]

    def observe(self, seconds: float) -> bool:
        return self._fit.update((1.0,), seconds)

    def to_dict(self) -> dict[str, float]:
        return {
            "seconds": self.seconds(),
            "rms_error_s": self.rms_error,
            "samples": self.samples,
        }


MB = 1e6
LOAD_STD_S = 0.5, 1.0 / MB
"""Standard deviations of a load's prior, wide because a medium may be a disk of 1 MB/s. The fit
then needs four loads; with the prior of a transfer it would need hundreds."""


def transfer_time(fixed_std_s: float = 0.05, byte_std_s: float = 0.005 / MB) -> LinearTime:
    """Return a model of the seconds to move bytes, by default over NIXL; prior: 5 ms, 1 GB/s."""
    return LinearTime(0.005, 0.001 / MB, fixed_std_s, byte_std_s, unit=MB, forgetting=0.98)


@dataclass(slots=True)
class CostModels:
    """The fitted models."""

    #: Step times of the decode engine, and of the prefill engine that reported last. Each is
    #: fitted once, on the engine's own replica.
    decode_step: StepTime = field(default_factory=StepTime)
    prefill_step: StepTime = field(default_factory=StepTime)
    transfer: LinearTime = field(default_factory=transfer_time)
    #: Loading from the machine's KV store, by the medium that the engine reads.
    loads: dict[str, LinearTime] = field(default_factory=dict)
    #: Overhead of the remote call, without the prefill engine's queue and computation.
    call: OverheadModel = field(default_factory=lambda: OverheadModel(0.020))
    #: Time from the call's return to the first token, without the transfer and the decode step.
    handoff: OverheadModel = field(default_factory=lambda: OverheadModel(0.005))
    #: Count, bytes and seconds of the transfers that `transfer` learned from.
    transfers: dict[str, float] = field(
        default_factory=lambda: {"count": 0, "bytes": 0, "seconds": 0.0}
    )

    def observe_transfer(self, size_bytes: int, seconds: float) -> None:
        """Learn from a KV transfer, and count it."""
        if self.transfer.observe(size_bytes, seconds):
            self.transfers["count"] += 1
            self.transfers["bytes"] += size_bytes
            self.transfers["seconds"] += seconds

    def load(self, medium: str) -> LinearTime:
        if medium not in self.loads:
            self.loads[medium] = transfer_time(*LOAD_STD_S)
        return self.loads[medium]

    def report_fields(self) -> dict[str, Any]:
        """Return the models' fields of a replica's report (`headrace_engine.reporting`)."""
        moves = self.transfer
        return {
            "call": (self.call.seconds(), self.call.rms_error),
            "handoff": (self.handoff.seconds(), self.handoff.rms_error),
            "transfer": (moves.fixed_s, moves.each_s, moves.rms_error),
            "loads": {
                medium: (fit.fixed_s, fit.each_s)
                for medium, fit in self.loads.items()
                if fit.samples
            },
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fits for JSON."""
        return {
            "decode_step": self.decode_step.summary(),
            "prefill_step": self.prefill_step.summary(),
            "transfer": self.transfer.to_dict(),
            **{f"load_{medium}": model.to_dict() for medium, model in self.loads.items()},
            "call": self.call.to_dict(),
            "handoff": self.handoff.to_dict(),
        }

"""Online models of what things cost, in seconds, fitted from what this cluster measured.

Each has a weak prior: it answers from the first request on, and after a few dozen samples the prior
no longer matters. No I/O, no clocks, no locks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.router.sharing import SharedCores
from headrace_engine.steptime import StepTime
from headrace_kvstore.fitting import LinearTime, RecursiveLeastSquares


class CallModel:
    """A fixed overhead in seconds: the mean of its samples, with forgetting (about 20 samples).

    Used for what a remote prefill costs beside engine queue and compute: the call
    (``call_s - queue_s - compute_s``), the hand-over of the KV, and the queue that others make.
    Samples may be negative (they are differences); the mean is held at 0 or above when used.
    ``rms_error`` is in seconds.
    """

    def __init__(self, prior_s: float, prior_std_s: float) -> None:
        self._fit = RecursiveLeastSquares(
            mean=(prior_s,), std=(prior_std_s,), error=prior_std_s, forgetting=0.95
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
"""A medium of the store may be a disk of 1 MB/s: four loads tell (with a transfer's, hundreds)."""


def transfer_time(fixed_std_s: float = 0.05, byte_std_s: float = 0.005 / MB) -> LinearTime:
    """Seconds to move bytes, by default over NIXL; assumed are 5 ms and 1 GB/s."""
    return LinearTime(0.005, 0.001 / MB, fixed_std_s, byte_std_s, unit=MB, forgetting=0.98)


@dataclass(slots=True)
class Costs:
    """The fitted models."""

    #: Step times of the decode engine, and of the prefill engine that told its own last: each is
    #: fitted where the engine is, once.
    decode_step: StepTime = field(default_factory=StepTime)
    prefill_step: StepTime = field(default_factory=StepTime)
    transfer: LinearTime = field(default_factory=transfer_time)
    #: Loading from the machine's KV store, by the medium that the engine reads.
    loads: dict[str, LinearTime] = field(default_factory=dict)
    #: The remote call beside the prefill engine's queue and compute.
    call: CallModel = field(default_factory=lambda: CallModel(0.020, 0.050))
    #: From the call's return to the first token, beside transfer and the decode step.
    handoff: CallModel = field(default_factory=lambda: CallModel(0.005, 0.050))
    #: What the engines lose to each other where they share a machine.
    shared: SharedCores = field(default_factory=SharedCores)

    def load(self, medium: str) -> LinearTime:
        if medium not in self.loads:
            self.loads[medium] = transfer_time(*LOAD_STD_S)
        return self.loads[medium]

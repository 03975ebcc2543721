"""A device whose work ends later than the call that asked for it. Its time passes only when a test
says so, or when somebody waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FakeDevice:
    """What all its streams share: the time."""

    now_s: float = 0.0
    due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.reach(self.now_s + seconds)

    def reach(self, at_s: float) -> None:
        """Let time pass until then; what was to be done by then is done, in order."""
        self.now_s = max(self.now_s, at_s)
        done = [each for each in self.due if each[0] <= self.now_s]
        self.due = [each for each in self.due if each[0] > self.now_s]
        for _, effect in sorted(done, key=lambda each: each[0]):
            effect()


class FakeStream:
    """A queue of work, done in order; a `device.clock.Clock`, whose marks are times."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.free_s = device, 0.0

    def launch(self, seconds: float, effect: Callable[[], None] | None = None) -> None:
        """Queue work; its effect is seen at its end. Returns at once."""
        self.free_s = self.mark() + seconds
        if effect is not None:
            self.device.due.append((self.free_s, effect))

    def wait_for(self, other: FakeStream) -> None:
        """What is queued from here on begins behind all that the other one has been given."""
        self.free_s = max(self.mark(), other.mark())

    def mark(self) -> float:
        return max(self.free_s, self.device.now_s)

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin if end <= self.device.now_s else None

    def wait(self, mark: float) -> None:
        self.device.reach(mark)

"""Names as small numbers, for tables that hold numbers only."""

from __future__ import annotations

from collections.abc import Hashable


class Interner:
    """Small numbers for names; 0 stands for none."""

    def __init__(self) -> None:
        self.names: list[Hashable] = [None]
        self._numbers: dict[Hashable, int] = {}

    def number(self, name: Hashable) -> int:
        """The name's number, new if need be; 0 when all 65535 are taken."""
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) == 2**16:
                return 0
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def find(self, name: Hashable) -> int:
        """The name's number, or 0."""
        return self._numbers.get(name, 0)

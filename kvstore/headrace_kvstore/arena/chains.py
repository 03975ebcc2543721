"""Orders blocks so that each follows its parent. Pure."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.table import hash_word


def chains(rows: np.ndarray) -> list[np.void]:
    """Rows of SLOT, each block right after its parent where that has no other child before it."""
    if not len(rows):
        return []
    by_word: dict[tuple[int, int], list[int]] = {}
    for i, (namespace, parent) in enumerate(
        zip(rows["namespace"].tolist(), rows["parent"].tolist(), strict=True)
    ):
        by_word.setdefault((namespace, parent), []).append(i)
    ordered: list[int] = []
    waiting: list[int] = []
    seen = np.zeros(len(rows), np.bool_)
    for root in np.argsort(rows["depth"], kind="stable").tolist():
        waiting.append(root)
        while waiting:
            i = waiting.pop()
            if seen[i]:
                continue
            seen[i] = True
            ordered.append(i)
            word = hash_word(rows["hash"][i].tobytes())
            waiting.extend(by_word.get((int(rows["namespace"][i]), word), ()))
    return [rows[i] for i in ordered]

"""`sparse_engine`'s process, as on a card."""

from __future__ import annotations

from tests.support.as_card import take_for_card

if __name__ == "__main__":
    take_for_card()
    from tests.support.sparse_engine import main

    main()

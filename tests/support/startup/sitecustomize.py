"""What Python imports first in each process of the tests: it looks for garbage seldom.

Importing vLLM makes objects that stay by the million. With Python's own thresholds a fifth of that
import's time is spent looking for garbage among them, and a run of the tests imports vLLM a hundred
times.
"""

import gc

gc.set_threshold(50_000, 10, 10)

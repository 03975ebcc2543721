"""What the fork server imports last: garbage is not looked for among what its imports made.

Each process that is forked would look there again, and by that copy the memory that it shares.
"""

import gc

gc.collect()
gc.freeze()

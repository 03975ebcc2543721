"""How this package's loops are compiled: without the GIL, and kept on disk where possible.

A look-up is a microsecond of small functions that hand arrays to one another. A call that is not
inlined copies seven to ten words of each array, and where it might raise, each view that it is
given is counted up and down with locked instructions. So every function is inlined into its
compiled callers, and a division by zero is inf or NaN instead of an error.
"""

from headrace_kvstore import compiled

jit = compiled.jit(nogil=True, forceinline=True, error_model="numpy")

"""The compiler settings of this package's loops: no GIL, and cached on disk where possible.

A look-up is a microsecond of small functions that pass arrays to one another. A call that is not
inlined copies seven to ten words of each array. If it might raise, the reference count of each view
that it receives is also raised and lowered with locked instructions. Therefore, every function is
inlined into its compiled callers, and a division by zero gives inf or NaN instead of an error.
"""

from headrace_kvstore import numba_jit as compiled

jit = compiled.jit(nogil=True, forceinline=True, error_model="numpy")

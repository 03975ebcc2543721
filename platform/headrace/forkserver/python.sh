#!/bin/sh
# What multiprocessing runs for `python` in a process that the fork server has forked.
exec "$HEADRACE_PYTHON" -IS "${0%/*}/launcher.py" "$@"

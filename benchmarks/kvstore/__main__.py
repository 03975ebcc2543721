"""Cost of the KV store's tiers against the bare hardware, a peer, and an engine without them.

    python -m benchmarks.kvstore [--quick] [--parts dram,nvme,...] [--json FILE] [--markdown FILE]

Parts, each described in its module:
    dram: arena and worker side against a plain copy
    nvme: the NVMe tier against the same NIXL backend alone
    remote: blocks of another node against the same NIXL backend alone
    object: the object tier against its client's bare requests
    mooncake: the arena against Mooncake's store
    ttft, idle, itl: real vLLM engines; `engine` selects all three
    overlap: loading during the computation; also in an engine, unless --quick

A part whose requirements are missing prints one line; this fails the run only if the part was
selected by name. The exit status is then 1, and also if a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.kvstore.report import document, table
from benchmarks.kvstore.timing import CannotRun, Figures

PARTS = ("dram", "nvme", "remote", "object", "mooncake", "ttft", "idle", "itl", "overlap")
GROUPS = {"engine": ("ttft", "idle", "itl")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the files; the exit status."""
    args = _arguments(argv)
    from benchmarks.serving.environment import environment
    from headrace.model import resolve

    figures, broken, missing = Figures(), [], []
    about = environment(resolve(args.model))
    del about["engine"]
    signal.signal(signal.SIGTERM, _stop)
    for part in args.parts or PARTS:
        began = time.monotonic()
        try:
            importlib.import_module(f"benchmarks.kvstore.{part}").measure(figures, args.quick)
        except CannotRun as reason:
            missing.append(part)
            print(f"{part}: not measured: {reason}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            broken.append(f"{part}: stopped before the end")
            break
        except Exception as error:
            traceback.print_exc()
            broken.append(f"{part}: {error}")
        about.setdefault("seconds", {})[part] = round(time.monotonic() - began, 1)
    print(table(figures))
    failure = "; ".join(broken) or None
    if args.json:
        text = json.dumps(document(figures, about, failure), indent=1)
        args.json.write_text(text + "\n")
    if args.markdown:
        args.markdown.write_text(table(figures) + "\n")
    return 1 if broken or (missing and args.parts) else 0


def parse_parts(text: str) -> list[str]:
    """Names of parts, separated by commas; a group stands for its parts.

    Raises:
        argparse.ArgumentTypeError: a name that is neither.
    """
    parts: list[str] = []
    for name in (each.strip() for each in text.split(",")):
        if name not in PARTS and name not in GROUPS:
            known = ", ".join((*PARTS, *GROUPS))
            raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")
        parts += [part for part in GROUPS.get(name, (name,)) if part not in parts]
    return parts


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kvstore", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--parts", type=parse_parts, metavar="A,B", help="these, and no others")
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures and environment")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

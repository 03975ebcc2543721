"""`python -m headrace_kvstore node`: run a StoreNode until SIGTERM or Ctrl-C.

    python -m headrace_kvstore node --config store.yaml
    python -m headrace_kvstore node --set name=headrace-kv --set nvme_folder=/mnt/kv --set warm=true
    python -m headrace_kvstore stats --set name=headrace-kv
    python -m headrace_kvstore pins --set name=headrace-kv
    python -m headrace_kvstore unpin --set name=headrace-kv --hash HEX
    python -m headrace_kvstore clear --set name=headrace-kv --namespace HEX
    python -m headrace_kvstore lookup --set name=headrace-kv --hash HEX

Settings are those of `NodeSettings`; `--set` goes before the file, and its values are read as YAML.
All commands but `node` ask the node that runs, and print its answer as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import yaml
import zmq

from headrace_kvstore.node.administration import ACTIONS, parse_hex
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeUnavailable, call
from headrace_kvstore.protocol.server import NodeAlreadyRunning
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.settings.store_settings import SettingsError

ANSWER_S = 30.0
"""Longest wait for the node: clearing a disk takes a while."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 for a node that is missing or cannot be; 2 for wrong settings."""
    parser = argparse.ArgumentParser("headrace_kvstore", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("node", "stats", *ACTIONS))
    parser.add_argument("--config", type=Path, help="YAML or JSON file of settings")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--namespace", help="digest in hex, as stats has it; default: all")
    parser.add_argument("--hash", help="of a block, in hex; for unpin and lookup")
    given = parser.parse_args(arguments)
    try:
        settings = _settings(given.config, given.set)
    except (SettingsError, OSError, yaml.YAMLError) as error:
        print(f"settings: {error}", file=sys.stderr)
        return 2
    if given.command == "node":
        return _run(settings)
    request: wire.Request = wire.GetStats()
    if given.command != "stats":
        try:
            namespace, block_hash = parse_hex(given.namespace, 16), parse_hex(given.hash, 32)
        except ValueError as error:
            print(f"--namespace, --hash: {error}", file=sys.stderr)
            return 2
        request = wire.Administer(given.command, namespace, block_hash)
    return _ask(settings, request)


def _settings(file: Path | None, pairs: list[str]) -> NodeSettings:
    values = {} if file is None else yaml.safe_load(file.read_text()) or {}
    if not isinstance(values, dict):
        raise SettingsError(f"{file}: holds no mapping of names to values")
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SettingsError(f"--set {pair}: give NAME=VALUE")
        values[name] = yaml.safe_load(value)
    return NodeSettings.parse(values)


def _run(settings: NodeSettings) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        node = StoreNode(settings).start()
    except (NodeAlreadyRunning, OSError, ValueError, zmq.ZMQError) as error:
        print(error, file=sys.stderr)
        return 1
    print("ready", flush=True)
    ended.wait()
    if not node.close():
        logging.shutdown()
        os._exit(0)  # a disk that hangs has threads of ours, and joining them would hang too
    return 0


def _ask(settings: NodeSettings, request: wire.Request) -> int:
    try:
        reply = call(settings.name, request, ANSWER_S, settings.socket_folder)
    except NodeUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    if not isinstance(reply, wire.Stats):
        print(reply.reason if isinstance(reply, wire.Failed) else reply, file=sys.stderr)
        return 1
    print(json.dumps(reply.values, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

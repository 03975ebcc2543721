"""Upgrade an app under load, from an earlier commit to this checkout, on one machine.

    python -m scripts.upgrade REVISION

Both versions are built as wheels, each is installed in an environment of its own, and each serves
the default model with the same configuration: API keys, and folders for conversation state and the
store's files. While clients stream answers, the new version starts beside the old one, clients
move to it, and the old one ends, as in an upgrade by a new Ray cluster. The check fails if

* a stream is lost, also one that runs when the old version is told to end;
* the new version does not continue a conversation of the old one, does not have its batch, or does
  not count its usage;
* its answer to the same prompt is another one, where both have the same vLLM.

It needs 12 GB of memory, 12 GB of disk, and about fifteen minutes.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai

from scripts.release import ROOT, build, run
from scripts.smoke import Installed

CLIENTS = 3
TOKENS, LONG_TOKENS = 32, 300
WAIT_S = 600.0
MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
PROMPTS = [f"Tell me about the number {number}, in a sentence or two." for number in range(6)]


def say(text: str) -> None:
    print(f"headrace upgrade: {text}", flush=True)


def expect(holds: bool, text: str) -> None:
    """End the check if something does not hold."""
    if not holds:
        sys.exit(f"error: {text}")


class Version:
    """An installed version with an app of its own.

    Args:
        folder: its environment and its state.
        wheel, lock: what is installed.
        key: an API key of the app.
    """

    def __init__(self, folder: Path, wheel: Path, lock: Path, key: str) -> None:
        folder.mkdir()
        self._installed, self._key = Installed(folder, wheel, lock), key
        found = re.search(r"vllm ([0-9.]+)", self._installed.headrace("--version"))
        self.vllm = found and found[1]

    def up(self, config: Path, name: str) -> None:
        """Start the app, and wait until it answers."""
        words = ("up", "--detach", "--json", "--name", name, "-f", str(config))
        told = self._installed.headrace(*words, "--set", "gateway.port=0")
        self.url = json.loads(told)["endpoint"]

    def down(self, name: str) -> None:
        """End the app, if it runs."""
        self._installed.headrace("down", "--name", name)

    def client(self) -> openai.OpenAI:
        """Return a client that sends no request twice."""
        return openai.OpenAI(base_url=self.url, api_key=self._key, max_retries=0, timeout=WAIT_S)

    def answer(self, prompt: str, tokens: int = TOKENS, **options: Any) -> str:
        """Return the likeliest answer to a prompt, from a stream that must end whole."""
        message = {"role": "user", "content": prompt}
        asked = {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": tokens}
        text, finish = "", None
        with self.client() as client:
            for chunk in client.chat.completions.create(**asked, **options, stream=True):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        if finish is None:
            raise RuntimeError("a stream ended without a finish reason")
        return text


class Load:
    """Clients that ask for one answer after the other, each from the version of the moment."""

    def __init__(self, version: Version) -> None:
        self.version, self.answers = version, 0
        self.failures: list[str] = []
        self._stops = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
        for each in self._threads:
            each.start()

    def _ask(self, number: int) -> None:
        while not self._stops.is_set():
            number += 1
            try:
                self.version.answer(PROMPTS[number % len(PROMPTS)])
                self.answers += 1
            except (openai.OpenAIError, RuntimeError) as error:
                self.failures.append(repr(error))
                time.sleep(1)

    def stop(self) -> None:
        """Let the clients end with the answers that they wait for."""
        self._stops.set()
        for each in self._threads:
            each.join()


def wheel_of(revision: str, folder: Path) -> tuple[Path, Path]:
    """Build the wheel of a revision; return it and the revision's lock."""
    source = folder / "source"
    run(["git", "worktree", "add", "--detach", source, revision])
    try:
        uv = Path(sys.executable).parent / "uv"
        command: list[str | Path] = [uv, "build", "--quiet", "--wheel", "--no-build-isolation"]
        run([*command, "--python", sys.executable, "-o", folder, source], source)
        lock = folder / "cpu.lock"
        lock.write_bytes((source / "requirements" / "cpu.lock").read_bytes())
    finally:
        run(["git", "worktree", "remove", "--force", source])
    [wheel] = folder.glob("*.whl")
    return wheel, lock


def configuration(folder: Path, keys: Path) -> Path:
    """Write the configuration of both versions."""
    file = folder / "headrace.yaml"
    for name in ("state", "nvme"):
        (folder / name).mkdir()
    sections = {
        "gateway": {
            "api_keys_file": str(keys),
            "conversations": {"folder": str(folder / "state")},
        },
        "store": {
            "dram_gb": 0.25,
            "nvme_folder": str(folder / "nvme"),
            "nvme_gb": 1,
            "node": {"secret": "a secret that outlives each version of the app"},
        },
        "drain_s": 120,
    }
    file.write_text(json.dumps(sections))  # JSON is YAML
    return file


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        expect(time.monotonic() < deadline, f"{what}: not within {WAIT_S:.0f} s")
        time.sleep(0.5)


def run_batch(version: Version) -> tuple[str, bytes]:
    """Run a batch; return its id and its output."""
    lines = [
        {
            **{"custom_id": f"n{number}", "method": "POST", "url": CHAT},
            "body": {"model": MODEL, "messages": [{"role": "user", "content": prompt}]},
        }
        for number, prompt in enumerate(PROMPTS)
    ]
    for line in lines:
        line["body"] |= {"max_tokens": TOKENS}  # type: ignore[operator]
    with version.client() as client:
        data = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", data), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        until(lambda: client.batches.retrieve(made.id).output_file_id is not None, "a batch")
        return made.id, output_of(client, made.id)


def output_of(client: openai.OpenAI, batch_id: str) -> bytes:
    """Return the output of a batch."""
    file = client.batches.retrieve(batch_id).output_file_id
    assert file is not None
    return client.files.content(file).read()


def answers_counted(version: Version) -> int:
    """Return the number of answers in the usage of the key's tenant."""
    with version.client() as client:
        path = version.url.removesuffix("/v1") + "/headrace/v1/usage"
        found = client.get(path, cast_to=object)
    assert isinstance(found, dict)
    return sum(int(each["requests"]) for each in found["usage"])


def upgrade(old: Version, new: Version, config: Path) -> None:
    """Upgrade under load; the first thing that is wrong ends the process."""
    old.up(config, "old")
    say(f"the old version answers at {old.url}")
    alone = [old.answer(prompt) for prompt in PROMPTS]
    with old.client() as client:
        first = client.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=8)
    batch_id, output = run_batch(old)
    load = Load(old)
    try:
        began = time.monotonic()
        new.up(config, "new")
        say(f"the new version answers after {time.monotonic() - began:.0f} s, beside the old one")
        load.version = new
        whole: list[str] = []

        def ask_long(number: int) -> None:
            options = {"extra_body": {"ignore_eos": True}}
            whole.append(old.answer(f"Story {number}:", LONG_TOKENS, **options))

        streams = [threading.Thread(target=ask_long, args=(number,)) for number in range(2)]
        for each in streams:
            each.start()
        time.sleep(3)
        old.down("old")
        for each in streams:
            each.join()
        say("the old version ended")
        expect(len(whole) == 2, "a stream that ran when the old version was told to end is lost")
        time.sleep(10)
    finally:
        load.stop()
    expect(not load.failures, f"{len(load.failures)} answers are lost: {load.failures[:3]}")
    say(f"{load.answers} answers by {CLIENTS} clients, none lost")
    with new.client() as client:
        again = client.responses.create(
            model=MODEL, input="And yours?", previous_response_id=first.id, max_output_tokens=8
        )
        expect(again.previous_response_id == first.id, "a conversation is not continued")
        kept = output_of(client, batch_id)
    expect(kept == output, "the output of a batch is another one")
    least = load.answers + len(PROMPTS) * 2 + 2
    until(lambda: answers_counted(new) >= least, f"usage of {least} answers")
    if old.vllm == new.vllm:
        differing = sum(new.answer(p) != answer for p, answer in zip(PROMPTS, alone, strict=True))
        expect(not differing, f"{differing} of {len(PROMPTS)} answers are others")
        say("the same prompts have the same answers")
    say("conversation, batch and usage of the old version are there")


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        sys.exit("usage: python -m scripts.upgrade REVISION")
    with tempfile.TemporaryDirectory(prefix="headrace-upgrade-") as name:
        folder = Path(name)
        for each in ("old", "new", "copy"):
            (folder / each).mkdir()
        old_files = wheel_of(arguments[0], folder / "old")
        new_files = build(folder / "new", folder / "copy"), ROOT / "requirements" / "cpu.lock"
        keys = folder / "keys.yaml"
        command: list[str | Path] = [Path(sys.executable).parent / "headrace", "keys", "add"]
        command += ["upgrade", "--admin"]
        key = json.loads(run([*command, "-f", keys, "--json"]))["key"]
        config = configuration(folder, keys)
        old = Version(folder / "old" / "app", *old_files, key)
        new = Version(folder / "new" / "app", *new_files, key)
        say(f"installed {arguments[0]} and this checkout")
        try:
            upgrade(old, new, config)
        finally:
            for version, name in ((old, "old"), (new, "new")):
                version.down(name)


if __name__ == "__main__":
    main(sys.argv[1:])

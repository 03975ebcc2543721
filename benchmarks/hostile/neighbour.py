"""A well-behaved client beside the hostile ones: streams answers, and times their tokens.

`Neighbour` does it in a thread, for the tests. The benchmark has it in a process of its own
(`NeighbourProcess`), so that the hostile client's work does not make its clock late.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import httpx

from benchmarks.client import run_first
from benchmarks.hostile.attacks import COMPLETE


class Neighbour:
    """Streams answers in a thread until it is told to stop.

    Args:
        tokens: of each answer.
        pause_s: between two answers.

    Attributes:
        itl_s: time between two tokens of an answer.
        came_s: when the second of them came, by the machine's monotonic clock.
    """

    def __init__(
        self,
        url: str,
        model: str,
        headers: Mapping[str, str],
        tokens: int = 200,
        pause_s: float = 0.0,
    ) -> None:
        self._pause_s = pause_s
        self._client = httpx.Client(base_url=url, headers=dict(headers), timeout=120.0)
        self._body = {
            "model": model,
            "prompt": "One, two, three, four,",
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        self.itl_s: list[float] = []
        self.came_s: list[float] = []
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let the answer under way end."""
        self._over.set()
        self._thread.join(120.0)
        self._client.close()

    def once(self) -> str:
        """Stream one answer; its text.

        Raises:
            httpx.HTTPError, ValueError: it did not come whole.
        """
        text, last = "", 0.0
        with self._client.stream("POST", COMPLETE, json=self._body) as response:
            if response.status_code != 200:
                raise ValueError(f"answered {response.status_code}")
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return text
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(line)
                now = time.monotonic()
                if last:
                    self.itl_s.append(now - last)
                    self.came_s.append(now)
                last = now
                text += event["choices"][0]["text"] if event["choices"] else ""
        raise ValueError("the stream ended early")

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(self.once())
            except (httpx.HTTPError, ValueError) as error:
                self.failures.append(repr(error))
                time.sleep(0.2)
            self._over.wait(self._pause_s)


class NeighbourProcess:
    """A `Neighbour` in a process of its own; arguments and attributes as there."""

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        self._asked = json.dumps({"url": url, "model": model, "headers": dict(headers)})
        self.itl_s: list[float] = []
        self.came_s: list[float] = []
        self.answers: list[str] = []
        self.failures: list[str] = []

    def __enter__(self) -> NeighbourProcess:
        """Start the process; return after its first answer."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hostile.neighbour"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Linux shares processors among sessions first. In the hostile client's session, the
            # neighbour would wait for the client's work.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        print(self._asked, file=self._process.stdin, flush=True)
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        """Let the answer under way end."""
        said = self._process.communicate("\n", timeout=120.0)[0]
        for name, values in json.loads(said).items():
            setattr(self, name, values)


def main() -> None:
    """Stream with the settings in the first line; at a second line, print the results."""
    run_first()
    with Neighbour(**json.loads(sys.stdin.readline())) as neighbour:
        while not (neighbour.answers or neighbour.failures):
            time.sleep(0.05)
        neighbour.itl_s.clear()
        neighbour.came_s.clear()
        print("streaming", flush=True)
        sys.stdin.readline()
    seen = {name: getattr(neighbour, name) for name in ("itl_s", "came_s", "answers", "failures")}
    print(json.dumps(seen))


def percentile(values: list[float], share: float) -> float:
    """Return the value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


if __name__ == "__main__":
    main()

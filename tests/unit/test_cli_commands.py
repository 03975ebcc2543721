"""The command line's surface: helps, exit statuses, one-line errors."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from headrace.cli import client, state
from headrace.cli.arguments import completion
from headrace.cli.main import main
from headrace_lab.cli.simulate import complete_policies


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0 if code is None else 1), out, err


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    return tmp_path / "state"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "up",
        "down",
        "status",
        "top",
        "explain",
        "chat",
        "doctor",
        "lab simulate",
        "version",
        "model",
        "model fetch",
        "model list",
        "model path",
        "model verify",
        "model check-kv",
        "corpus",
        "corpus load",
        "corpus list",
        "corpus remove",
        "corpus stats",
        "config",
        "config show",
        "config check",
        "config init",
        "config diff",
    ],
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *command.split(), "--help")
    assert code == 0
    assert "Usage:" in out


def test_the_help_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "-h")
    for group in ("Run", "Look", "Models and KV", "Configure", "Other packages"):
        assert f"─ {group} ─" in out


def test_help_breaks_no_paragraph_and_names_no_type_of_a_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(capsys, "up", "-h")
    assert "started it, unless --detach or nohup is used." in out and "bool" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve m", "there is no command 'serve'; did you mean headrace up?"),
        ("config validate", "there is no command 'validate'; did you mean headrace config check?"),
        ("fetch x", "there is no command 'fetch'; did you mean headrace model fetch?"),
        ("statsu", "there is no command 'statsu'; did you mean headrace status?"),
        ("model lst", "there is no command 'lst'; did you mean headrace model list?"),
        ("qqq", "no such command 'qqq'; see headrace -h"),
        ("keys add", "missing argument 'name'; see headrace keys add -h"),
        (
            "top --every soon",
            "invalid value for '--every': must be a valid number; see headrace top -h",
        ),
        ("up --json", "--json needs --detach: without it, the command does not end"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_what_would_be_right(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, *arguments.split()) == (2, "", f"error: {said}\n")


@pytest.mark.parametrize(
    ("complete", "begin", "found"),
    [
        (completion.presets, "gpu", ["gpu-cluster", "gpu-node"]),
        (completion.models, "smollm2-135", ["smollm2-135m-instruct"]),
        (complete_policies, "dynamo", ["dynamo", "dynamo-conditional"]),
        (completion.fields, "gateway.po", ["gateway.port="]),
        (completion.fields, "techniques.blending.mo", ["techniques.blending.mode="]),
    ],
)
def test_values_of_options_are_completed(
    complete: Callable[[str], list[str]], begin: str, found: list[str]
) -> None:
    assert complete(begin) == found


def test_names_of_instances_are_completed() -> None:
    state.create(state.Instance(name="mine", token="t"))
    assert completion.instances("m") == ["mine"] and completion.instances("x") == []


def test_config_check_tells_json_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config", "check", "--json", "--set", "decode.threads=0")
    assert code == 2
    assert json.loads(out)["errors"] == ["decode.threads: must be >= 1, got 0"]
    code, out, _ = run(capsys, "config", "check", "--json")
    assert code == 0 and json.loads(out)["ok"]


def test_models_are_listed_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "model", "list", "--json")
    assert code == 0 and "smollm2-135m-instruct" in [each["name"] for each in json.loads(out)]


def test_the_versions_are_printed_by_command_and_by_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (code, told, _), (also, same, _) = run(capsys, "version"), run(capsys, "--version")
    assert code == also == 0 and told == same and told.startswith("headrace ")


class OneAnswer(BaseHTTPRequestHandler):
    """An endpoint that answers each question with two tokens."""

    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({**body, "request": self.headers["x-request-id"]})
        choice = {"index": 0, "finish_reason": None}
        chunks: list[dict[str, Any]] = [
            {"choices": [{**choice, "delta": {"content": text}}]} for text in ("Par", "is.")
        ]
        chunks.append({"choices": [], "usage": {"completion_tokens": 2}})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for chunk in [*map(json.dumps, chunks), "[DONE]"]:
            self.wfile.write(f"data: {chunk}\n\n".encode())

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What the running instance was asked."""
    OneAnswer.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), OneAnswer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        instance = state.Instance(name="a", token="t", phase="ready", endpoint=url)
        monkeypatch.setattr(client, "running_instance", lambda name: instance)
        yield OneAnswer.asked
        server.shutdown()


@pytest.mark.parametrize(("options", "temperature"), [((), 0.0), (("--temperature", "0.7"), 0.7)])
def test_chat_takes_the_likeliest_tokens_unless_asked_otherwise(
    options: tuple[str, ...],
    temperature: float,
    capsys: pytest.CaptureFixture[str],
    asked: list[dict[str, Any]],
) -> None:
    """At vLLM's own default of 1 a small model answers with noise."""
    assert run(capsys, "chat", "Capital of France?", *options)[:2] == (0, "Paris.\n")
    assert asked[0]["max_tokens"] == 1024 and asked[0]["temperature"] == temperature


def test_chat_ends_with_times_and_the_command_that_explains_them(
    capsys: pytest.CaptureFixture[str], asked: list[dict[str, Any]]
) -> None:
    _, _, said = run(capsys, "chat", "Capital of France?")
    assert re.fullmatch(
        r"2 tokens; the first after \d+\.\d\d s(, then \d+ a second)?\. "
        rf"Why so: headrace explain {asked[0]['request']}\n",
        said,
    )


def test_help_imports_neither_ray_nor_vllm_nor_torch() -> None:
    code = (
        "import sys\n"
        "from headrace.cli.main import main\n"
        "try: main(['up', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'ray', 'vllm', 'torch', 'transformers', 'openai'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 10  # 0.3 s on an idle machine


@pytest.mark.parametrize(
    ("module", "why"),
    [("import nowhere", "ModuleNotFoundError: No module"), ("app = 3", "TypeError: broken:app is")],
)
def test_a_package_whose_commands_cannot_be_loaded_costs_a_warning(
    tmp_path: Path, module: str, why: str
) -> None:
    (tmp_path / "broken.py").write_text(module)
    about = tmp_path / "broken-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[headrace.commands]\nextra = broken:app\n")
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "keys", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.returncode == 0 and "revoke" in done.stdout
    warning = " ".join(done.stderr.split())
    assert warning.startswith(f"warning: the command extra of broken:app cannot be loaded: {why}")


def test_no_command_needs_ray_in_its_own_process() -> None:
    code = (
        "import pkgutil, sys, importlib, headrace.cli\n"
        "for module in pkgutil.iter_modules(headrace.cli.__path__, 'headrace.cli.'):\n"
        "    importlib.import_module(module.name) if '__main__' not in module.name else None\n"
        "heavy = {'ray', 'vllm', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["up"], ["config", "check"], ["config", "show"]])
def test_a_bad_configuration_is_exit_2_and_a_line_a_problem(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *command, "--set", "gatewya.port=1", "--set", "decode.threads=0")
    assert code == 2
    assert out == ""
    assert sorted(err.splitlines()) == [
        "error: decode.threads: must be >= 1, got 0",
        'error: gatewya: unknown field; did you mean "gateway"?',
    ]


def test_nothing_running_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status"], ["chat", "hello"]):
        code, _, err = run(capsys, *command)
        assert code == 1
        assert err.startswith(
            "error: nothing is running; start it with headrace up, or set HEADRACE"
        )
    code, _, err = run(capsys, "status", "--name", "x")
    assert err == 'error: no instance called "x" is running; start it with: headrace up --name x\n'
    code, out, _ = run(capsys, "down")
    assert (code, out) == (0, "nothing is running\n")


def test_a_name_that_cannot_be_one_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["down"], ["status"], ["up", "--set", "gateway.port=0"]):
        code, _, err = run(capsys, *command, "--name", "../x")
        assert code == 2
        assert err.startswith('error: "../x" cannot be a name')


def test_a_port_in_use_fails_before_anything_starts(
    capsys: pytest.CaptureFixture[str], own_state: Path
) -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code, _, err = run(capsys, "up", "--set", f"gateway.port={port}")
    assert code == 1
    assert err.startswith(f"error: gateway.port: {port} is in use on 127.0.0.1; free it, or")
    assert not own_state.exists()


def test_a_port_of_a_running_instance_is_refused_with_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = state.Instance("other", "token", endpoint="http://127.0.0.1:8000")
    monkeypatch.setattr(state, "instances", lambda: iter([other]))
    monkeypatch.setattr(state.Instance, "running", lambda self: True)
    code, _, err = run(capsys, "up")
    assert code == 1
    assert err == (
        'error: gateway.port: 8000 is in use by the running instance "other"; stop it with: '
        "headrace down --name other, or set gateway.port=0 for any free port\n"
    )


def test_config_show_masks_keys_and_loads_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for secret in ("gateway.api_keys=[sk-very-secret]", "store.object_options={k: sk-very-secret}"):
        _, out, _ = run(capsys, "config", "show", "--set", secret)
        assert "sk-very-secret" not in out
        assert "'***'" in out
    _, out, _ = run(capsys, "config", "show", "--preset", "gpu-node")
    (tmp_path / "c.yaml").write_text(out)
    code, out, _ = run(capsys, "config", "check", "-f", str(tmp_path / "c.yaml"))
    assert (code, out) == (0, f"{tmp_path / 'c.yaml'}: no mistakes found\n")


def test_version_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "version", "--json")
    assert {"headrace", "ray", "vllm", "nixl"} <= set(json.loads(out))


def test_unexpected_errors_are_one_line_unless_debugging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: object) -> state.Instance:
        raise OSError("the disk\nis on fire")

    monkeypatch.setattr(client, "running_instance", broken)
    code, _, err = run(capsys, "status")
    assert (code, err) == (1, "error: OSError: the disk is on fire (--debug shows where)\n")
    with pytest.raises(OSError, match="on fire"):
        main(["status", "--debug"])


def test_state_is_private_exclusive_and_survives_nonsense(own_state: Path) -> None:
    instance = state.Instance(name="a", token="t", endpoint="http://127.0.0.1:1")
    state.create(instance)
    file = own_state / "a.json"
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        state.create(instance)
    instance.phase = "ready"
    state.save(instance)
    assert file.stat().st_mode & 0o777 == 0o600
    assert state.load("a") == instance
    assert [i.name for i in state.instances()] == ["a"]
    assert not instance.running()
    state.remove("a", "of another")
    assert state.load("a") == instance
    state.remove("a", "t")
    state.remove("a", "t")
    assert state.load("a") is None
    state.create(instance)
    file.write_text(file.read_text().replace('"name"', '"of_another_version": 1, "name"'))
    assert state.load("a") == instance
    for nonsense in ("{", "[]", "{}", '{"supervisor": 1}'):
        file.write_text(nonsense)
        assert state.load("a") is None
    assert list(state.instances()) == []

"""The last lines of `headrace up`: the addresses of an instance that is ready."""

from __future__ import annotations

import json

from headrace.cli import state
from headrace.cli.console import stdout
from headrace.cli.show import status


def addresses(instance: state.Instance, took_s: float) -> dict[str, object]:
    """Return the instance for `--json`; a dashboard's token is in a file."""
    dashboard = instance.dashboard_url
    return {
        "name": instance.name,
        "endpoint": f"{instance.endpoint}/v1",
        "model": instance.model,
        **({"models": instance.models} if instance.models else {}),
        "dashboard": dashboard,
        "dashboard_token_file": status.token_file(instance) if dashboard else None,
        "ready_after_s": round(took_s, 1),
    }


def announce(instance: state.Instance, took_s: float, detach: bool) -> None:
    """Print the addresses of an instance that is ready, a first request, and how to stop it."""
    out = stdout()
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if instance.api_key else ""
    body = json.dumps(
        {"model": instance.model, "messages": [{"role": "user", "content": "Hello!"}]}
    )
    lines = [
        f"endpoint   {instance.endpoint}/v1",
        f"model      {instance.model}",
    ]
    if instance.models:
        lines[-1] = f"models     {', '.join(instance.models)}"
    if instance.dashboard_url:
        lines.append(f"dashboard  {instance.dashboard_url}")
        lines.append(f"  token    {status.token_file(instance)}")
    lines.append(
        f"try        curl {instance.endpoint}/v1/chat/completions "
        f"-H 'Content-Type: application/json'{key} -d '{body}'"
    )
    name = "" if instance.name == "default" else f" --name {instance.name}"
    how = f"headrace down{name}" if detach else "Ctrl-C"
    lines.append(f"ready      after {took_s:.0f} s; stop it with {how}")
    for line in lines:
        out.print(line, markup=False)

"""`headrace lab simulate`: its options. `command` carries it out."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments.options import JsonOption
from headrace.placement_policies import COST, RULES


def complete_policies(incomplete: str) -> list[str]:
    """Return the placement rules whose names begin so, for a shell."""
    ours = {"headrace", "headrace-remote", "two-choices", *RULES} - {COST}
    added = (point.name for point in entry_points(group="headrace.simulate.policies"))
    return sorted(name for name in {*ours, *added} if name.startswith(incomplete))


def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            "--trace",
            help="Trace in Mooncake's form, one JSON object a line; or sample, 370 requests of a "
            "chat service that come with Headrace.",
        ),
    ] = Path("sample"),
    prefill: Annotated[
        int, typer.Option(min=0, max=4096, help="Prefill engines; 0 lets every engine do both.")
    ] = 4,
    decode: Annotated[int, typer.Option(min=1, max=4096, help="Decode engines.")] = 4,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Placement rule: headrace (the default), headrace-remote, "
            f"{', '.join(name for name in RULES if name != COST)}, two-choices, or one that a "
            "package adds: ray, dynamo, dynamo-conditional, llm-d, mooncake, sglang or aibrix. "
            "Can be repeated.",
            autocompletion=complete_policies,
        ),
    ] = None,
    load: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=100,
            help="1.0 is the rate at which the prefill engines compute all the time, if each block "
            "is computed only once.",
        ),
    ] = 0.7,
    seconds: Annotated[
        float,
        typer.Option(
            min=1,
            max=86400,
            help="Seconds during which requests arrive. The first 30 % fill caches.",
        ),
    ] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same run.")] = 0,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="Take step times and transfer times from a running app (its URL) or a JSON file "
            "instead of a GPU of the H100 kind with an 8B model."
        ),
    ] = None,
    store_tb: Annotated[
        float | None,
        typer.Option(
            min=0, help="TB of KV store of each node of 8 engines; 0 for none. Default: 8."
        ),
    ] = None,
    ttft: Annotated[
        float, typer.Option(min=0.001, help="Goodput: maximum seconds to the first token...")
    ] = 2.0,
    ttft_token_ms: Annotated[
        float, typer.Option(min=0, help="... plus milliseconds for each token of the prompt.")
    ] = 0.1,
    itl_ms: Annotated[
        float,
        typer.Option(min=0.001, help="Goodput: maximum mean inter-token latency, in ms."),
    ] = 50.0,
    failures: Annotated[
        int, typer.Option(min=0, max=1000, help="Engines that fail, each for a minute.")
    ] = 0,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write all figures to this file, as JSON.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a page with charts to this file (.html).")
    ] = None,
) -> None:
    """Play a trace on simulated engines, and compare placement rules.

    Runs the gateway's own placement code. Needs no GPU and no running app.
    """
    from headrace_lab.cli.simulate import command

    options = command.SimulateOptions(
        trace=trace,
        prefill=prefill,
        decode=decode,
        policies=list(dict.fromkeys(policies or ["headrace"])),
        load=load,
        seconds=seconds,
        seed=seed,
        calibrate=calibrate,
        store_tb=store_tb,
        ttft_s=ttft,
        ttft_token_ms=ttft_token_ms,
        itl_ms=itl_ms,
        failures=failures,
    )
    command.run(options, as_json=as_json, output=output, report=report)

"""The commands of the groups `model`, `corpus`, `store` and `keys`, and their options.

Each group is carried out by the module of its name (`model` by `models` and `kv_size`, `store` by
`show.store`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import completion
from headrace.cli.arguments.options import JsonOption, KnownModelArgument, NameOption

model_app = typer.Typer(help="Download and inspect models.", no_args_is_help=True)
corpus_app = typer.Typer(
    help="Load texts that answers are likely to quote, for speculative decoding.",
    no_args_is_help=True,
)
store_app = typer.Typer(
    help="Inspect, unpin and clear the KV blocks of a running app's store.",
    no_args_is_help=True,
)
keys_app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)


@model_app.command("fetch")
def model_fetch(
    name: KnownModelArgument,
) -> None:
    """Download a model into the cache, and print its folder; resumes a broken download."""
    from headrace.cli import models

    models.fetch(name)


@model_app.command("copy")
def model_copy(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="s3://BUCKET/PREFIX, gs:// or az://.", show_default=False
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to copy into.", show_default=False)
    ],
) -> None:
    """Copy a model out of an object store into a folder, and print the folder; continues a copy
    that broke."""
    from headrace.cli import models

    models.copy(url, folder)


@model_app.command("list")
def model_list(as_json: JsonOption = False) -> None:
    """List the models that Headrace knows by name."""
    from headrace.cli import models

    models.show_list(as_json=as_json)


@model_app.command("path")
def model_path(
    name: Annotated[
        str,
        typer.Argument(
            help="Name from headrace model list, folder, or Hugging Face id.",
            autocompletion=completion.models,
        ),
    ],
) -> None:
    """Print the folder of a model that is on this machine."""
    from headrace.cli import models

    models.path(name)


@model_app.command("verify")
def model_verify(
    name: KnownModelArgument,
) -> None:
    """Compare a downloaded model with its checksums."""
    from headrace.cli import models

    models.verify(name)


@model_app.command("check-kv")
def model_check_kv(
    source: Annotated[
        str,
        typer.Argument(
            help="A config.json, a model folder, or a name from headrace model list.",
            metavar="CONFIG_OR_FOLDER",
            autocompletion=completion.models,
        ),
    ],
    gpu_memory: Annotated[
        float, typer.Option(min=0.0, help="GiB of memory, for weights and KV.")
    ] = 80.0,
    gpu_share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="As vLLM's gpu_memory_utilization."),
    ] = 0.9,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one request. Default: the model's limit.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Show the size of a model's KV, as it is and as MHA, GQA, MQA, MLA, CLA, YOCO, FusedKV, fp8
    or int4: bytes, blocks, contexts that fit."""
    from headrace.cli import kv_size

    kv_size.check_kv(
        source,
        gpu_memory_gib=gpu_memory,
        gpu_share=gpu_share,
        context=context,
        block_tokens=block_tokens,
        as_json=as_json,
    )


TenantOption = Annotated[
    str | None,
    typer.Option(
        help="Cache salt of the tenant that the corpus is for. Default: all tenants, which "
        "needs speculation.corpora: true."
    ),
]


@corpus_app.command("load")
def corpus_load(
    paths: Annotated[list[Path], typer.Argument(help="Text files, or folders of text files.")],
    corpus: Annotated[str, typer.Option(help="Name of the corpus.")],
    tenant: TenantOption = None,
    ttl: Annotated[
        float | None, typer.Option(min=1, help="Seconds until the corpus expires. Default: never.")
    ] = None,
    name: NameOption = None,
) -> None:
    """Load files as a corpus. An older version stays in use until all files are loaded."""
    from headrace.cli import corpus as command

    command.load(paths, corpus=corpus, tenant=tenant, ttl_s=ttl, name=name)


@corpus_app.command("list")
def corpus_list(name: NameOption = None, as_json: JsonOption = False) -> None:
    """List the corpora, and how many tokens drafted from them were accepted."""
    from headrace.cli import corpus as command

    command.show_list(name, as_json=as_json)


@corpus_app.command("remove")
def corpus_remove(
    corpus: Annotated[str, typer.Argument(help="Name from headrace corpus list.")],
    tenant: TenantOption = None,
    name: NameOption = None,
) -> None:
    """Remove a corpus."""
    from headrace.cli import corpus as command

    command.remove(corpus, tenant=tenant, name=name)


@corpus_app.command("stats")
def corpus_stats(name: NameOption = None, as_json: JsonOption = False) -> None:
    """Show how full each replica's memory of token sequences is."""
    from headrace.cli import corpus as command

    command.stats(name, as_json=as_json)


NamespaceOption = Annotated[
    str | None,
    typer.Option(help="Digest of one namespace, from headrace status --json. Default: all."),
]


@store_app.command("pins")
def store_pins(name: NameOption = None, as_json: JsonOption = False) -> None:
    """List the prompts that are pinned in DRAM, on each machine, and their size."""
    from headrace.cli.show import store

    store.pins(name, as_json=as_json)


@store_app.command("unpin")
def store_unpin(
    hash: Annotated[
        str | None,
        typer.Argument(help="Pin from headrace store pins. Default: all pins.", show_default=False),
    ] = None,
    namespace: NamespaceOption = None,
    name: NameOption = None,
) -> None:
    """Let pinned prompts be evicted again."""
    from headrace.cli.show import store

    store.order("unpin", namespace, hash, name)


@store_app.command("clear")
def store_clear(
    namespace: NamespaceOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    name: NameOption = None,
) -> None:
    """Remove KV blocks from the DRAM and disks of all machines, pinned ones too. Objects stay."""
    from headrace.cli.show import store

    what = "all blocks" if namespace is None else f"the blocks of namespace {namespace}"
    if not yes:
        typer.confirm(f"Remove {what} from DRAM and disks?", abort=True)
    store.order("clear", namespace, None, name)


@store_app.command("lookup")
def store_lookup(
    hash: Annotated[str, typer.Argument(help="Hash of a block, in hex.")],
    namespace: NamespaceOption = None,
    name: NameOption = None,
) -> None:
    """Show which tiers of which machines hold a block."""
    from headrace.cli.show import store

    store.order("lookup", namespace, hash, name)


KeyFileOption = Annotated[
    Path, typer.Option("--file", "-f", help="The key file, as in gateway.api_keys_file.")
]


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Name of the key in logs and lists.")],
    file: KeyFileOption,
    tenant: Annotated[
        str | None,
        typer.Option(help="Keys of one tenant share KV and draft tokens. Default: the key's name."),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="The key may also change how the app works.")
    ] = False,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at once.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests a minute.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model or alias that requests may name; repeat it. Default: all."),
    ] = None,
    max_retention_s: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=86_400,
            help="Maximum seconds for which requests may have KV retained in DRAM. Default: "
            "gateway.max_retention_s.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key, add its hash to the file, and print the key."""
    from headrace.cli import keys

    keys.add(
        file,
        name=name,
        tenant=tenant,
        role="admin" if admin else "user",
        max_concurrent=max_concurrent,
        requests_per_minute=requests_per_minute,
        models=model,
        max_retention_s=max_retention_s,
        as_json=as_json,
    )


@keys_app.command("list")
def keys_list(file: KeyFileOption, as_json: JsonOption = False) -> None:
    """List the keys of a file: names, tenants, roles and limits."""
    from headrace.cli import keys

    keys.show_list(file, as_json=as_json)


@keys_app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(help="See `headrace keys list`.")], file: KeyFileOption
) -> None:
    """Remove a key from the file; running gateways refuse it within seconds."""
    from headrace.cli import keys

    keys.revoke(file, name)

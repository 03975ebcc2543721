"""`headrace fuse`: make models whose upper layers keep no KV."""

from headrace.cli.fuse.commands import fuse_app

__all__ = ["fuse_app"]

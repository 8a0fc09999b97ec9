"""`kvtier bench`: what this machine's memory and disk, and this bucket, give, and what that means for restoring a prompt."""

from kvstore.cli.bench.command import app

__all__ = ["app"]

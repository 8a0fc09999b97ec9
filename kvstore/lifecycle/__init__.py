"""What keeps a repository in order while nobody looks: collection."""

from kvstore.lifecycle.collector import collect

__all__ = ["collect"]

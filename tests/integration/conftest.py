"""A whole node as a person starts it."""

from fakes.up import up

__all__ = ["up"]

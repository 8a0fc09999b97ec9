"""What tests of the HTTP face have in common."""

from fakes.node import SHARD, namespace

from kvstore.server.limits import Limits

NS = namespace()


LIMITS = Limits(drain=5)


def block_path(link, tokens=16, **query):
    more = "".join(f"&{key}={value}" for key, value in query.items())
    return f"/v1/blocks/{NS.id}/{SHARD}/{link.prefix_id}?tokens={tokens}{more}"

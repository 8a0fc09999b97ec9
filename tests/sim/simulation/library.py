"""The blocks that engines compute, the same on every node, and which of them a node holds."""

from kvstore.ids import BlockName, Shard, chain
from kvstore.repo.testing import ONE_SHARD, raw_block, tiny

TENANTS = ("amy", "bob")  # they use the same session ids and the same tokens


class Library:
    """What each name stands for."""

    def __init__(self):
        self.namespaces = {tenant: tiny(tenant) for tenant in TENANTS}
        self.tenants = {fields.id: tenant for tenant, fields in self.namespaces.items()}
        self.tokens = {}  # link -> all tokens up to and with it
        self._chains = {}
        self._bodies = {}

    def links(self, tenant, tokens):
        tokens = tuple(tokens)
        found = self._chains.get((tenant, tokens))
        if found is None:
            found = self._chains[tenant, tokens] = chain(self.namespaces[tenant], tokens, partial=True)
            end = 0
            for link in found:
                end += link.tokens
                self.tokens[link] = tokens[:end]
        return found

    def fill(self, shelf, tenant, tokens, shards=ONE_SHARD):
        """Compute these tokens on a node."""
        fields, start = self.namespaces[tenant], 0
        links = self.links(tenant, tokens)
        for link in links:
            for shard in shards:
                name = BlockName(fields.id, Shard.parse(shard), link.prefix_id, link.tokens)
                if name not in self._bodies:
                    self._bodies[name] = raw_block(fields, name, tokens[start : start + link.tokens])
                shelf.held[name] = self._bodies[name]
            start += link.tokens
        return links

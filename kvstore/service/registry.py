"""Which namespaces a node knows, and who may use them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from cachetools import LRUCache

from kvstore import api
from kvstore.errors import Invalid, NotFound
from kvstore.ids import Namespace, NamespaceId, namespace_id
from kvstore.service.latest import Latest

_CACHED = 10_000


class NamespaceStore(Protocol):
    """Where namespaces are kept for good: the bucket."""

    async def put_namespace(self, namespace: Namespace) -> None:
        """Keep it readable under its id."""
        ...

    async def namespace(self, namespace: NamespaceId) -> Namespace | None:
        """Its fields, or None."""
        ...

    async def namespaces(self, tenant: str) -> list[Namespace]:
        """All of a tenant's."""
        ...


class Registry:
    """Namespaces by id. Another tenant's namespace is answered exactly like one that nobody ever made, and takes what that takes.

    Ids are hashes of what can be guessed: a model's name and shape, a tenant's. So which one is asked for must not decide what is
    read: an id that is not among the tenant's own is looked for in the list of all that there are. An object that is there, or that
    the node has read for another tenant, would be answered in another time than one that is not.
    """

    def __init__(self, store: NamespaceStore | None) -> None:
        self._store = store
        self._known: LRUCache[str, Namespace] = LRUCache(_CACHED)
        self._listings: dict[str, Latest[list[Namespace]]] = {}  # by tenant

    async def put(self, tenant: str, claimed: str, fields: Namespace) -> None:
        """Take a namespace in; it is written to the bucket once per node.

        Raises:
            Invalid: The id is not that of the fields, or they name another tenant.
        """
        if fields.id != claimed:
            raise Invalid(f"namespace {claimed} is not the id of these fields, which is {fields.id}")
        if fields.tenant != tenant:
            raise Invalid(
                f"namespace.tenant is {fields.tenant!r} and the caller is {tenant!r}",
                remedy=f'put "tenant": "{tenant}" into the namespace',
            )
        if claimed not in self._known:
            if self._store is not None:
                await self._store.put_namespace(fields)
            self._known[claimed] = fields

    def learn(self, fields: Namespace) -> None:
        """Know a namespace without writing it anywhere."""
        self._known[fields.id] = fields

    def known(self, tenant: str, wanted: str) -> Namespace | None:
        """A namespace's fields where they need no look into the bucket."""
        found = self._known.get(wanted)
        return found if found is not None and found.tenant == tenant else None

    async def get(self, tenant: str, wanted: str) -> Namespace:
        """A namespace's fields; the id is whatever a caller named.

        Raises:
            NotFound: Nobody registered it, or it is another tenant's.
        """
        found = self.known(tenant, namespace_id(wanted))
        if found is None and self._store is not None:
            listed = await self._listings.setdefault(tenant, Latest(partial(self._store.namespaces, tenant)))()
            found = next((each for each in listed if each.id == wanted), None)
            if found is not None:
                self.learn(found)  # it alone: a tenant that has very many would push out what others use
        return _there(found, wanted)

    async def held(self, tenant: str, wanted: str) -> Namespace:
        """The same where the tenant is known to have something in it: the id is no guess, and its object is read alone."""
        found = self.known(tenant, namespace_id(wanted))
        if found is None and self._store is not None:
            found = await self._store.namespace(namespace_id(wanted))
            if found is not None:
                self._known[found.id] = found
        return _there(found if found is not None and found.tenant == tenant else None, wanted)

    async def all(self, tenant: str, alive: Mapping[str, api.Usage]) -> api.Namespaces:
        """Every namespace of a tenant in the bucket or known here, and what is alive of it, by namespace."""
        mine = {each.id: each for each in await self._store.namespaces(tenant)} if self._store is not None else {}
        mine |= {each.id: each for each in self._known.values() if each.tenant == tenant}  # some are in no bucket, or not yet
        return api.Namespaces(namespaces=[_info(each, alive.get(each.id)) for each in mine.values()])


def _there(found: Namespace | None, wanted: str) -> Namespace:
    if found is None:
        raise NotFound(f"namespace {wanted} is not known: register its fields first (PUT /v1/namespaces/{wanted})")
    return found


def _info(fields: Namespace, alive: api.Usage | None) -> api.NamespaceInfo:
    blocks, size = (alive.blocks, alive.bytes) if alive is not None else (-1, -1)
    return api.NamespaceInfo(namespace=fields.id, fields=fields, blocks=blocks, bytes=size)

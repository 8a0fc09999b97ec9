"""Storage URLs, directories' URLs, and the names inside keys."""

import contextlib

from kvstore.config import StorageUrl
from kvstore.config.addresses import parse_address
from kvstore.config.storage_url import URL_KEYS
from kvstore.directory_url import DirectoryUrl
from kvstore.errors import Invalid, KVTierError
from kvstore.ids import Shard
from kvstore.keys import Keys, check_id
from parsers.target import Target, same, text_of


def storage_url(data):
    try:
        url = StorageUrl.parse(text_of(data))
    except KVTierError:
        return
    if url.scheme in {"s3", "memory"}:  # what [store] url gets of it
        again = StorageUrl.parse(url.store_url())
        kept = ("scheme", "host", "path", "endpoint", "region", "addressing", "ca_bundle", "allow_http")
        same(*([getattr(each, field) for field in kept] for each in (url, again)))


def directory_url(data):
    try:
        url = DirectoryUrl.parse(text_of(data))
    except KVTierError:
        return
    assert url.host
    assert 0 <= url.port <= 65535
    assert 0 <= url.db < 100_000


def names(data):
    """An address, a shard, a tenant, and the keys of a bucket: whatever they are made of."""
    text = text_of(data)
    try:
        host, port = parse_address(text)
        assert host is not None
        assert 0 <= port <= 65535
    except Invalid:
        pass
    with contextlib.suppress(Invalid):
        same(Shard.parse(text).text, text)
    keys = Keys("root")
    for key in (text, keys.blocks + text, keys.heads() + text, keys.manifests() + text, "root/names/" + text):
        found = keys.parse_block(key)
        if found is not None:
            same(keys.block(found.namespace, found.shard, found.prefix_id, found.gen), key)
        keys.parse_head(key)
        keys.parse_manifest(key)
        keys.parse_name(key)
    try:
        check_id(text, "tenant")
    except Invalid:
        return
    try:
        head = keys.head(text, "family")
    except Invalid:  # too long
        return
    assert head.count("/") == 3
    assert head.isascii()


_HEX = b"ab" * 32
TARGETS = (
    Target(
        "storage_url",
        storage_url,
        (
            b"kvtier+unix:///run/kvtier/node.sock?tenant=a",
            b"kvtier://[::1]:7878?tls=true&ca_bundle=/a&client_cert=c&client_key=k&token_file=t",
            b"s3://bucket/a/b?endpoint=http://127.0.0.1:9000&region=eu&addressing=path&allow_http=true&dram=4GiB&nvme=1.5TB",
            b"memory://name?codec=bp-zstd&durability=nvme&device=cuda:0&device_bytes=3&key_file=k&nvme_path=%2Fa%20b",
        ),
        (b"://", b"?", b"&", b"=", b"%", b"@", b"[", b"]", *(key.encode() for key in URL_KEYS)),
        1024,
    ),
    Target(
        "directory_url",
        directory_url,
        (b"valkey://10.0.0.5:6379/0", b"rediss://[::1]:1/3?ca_bundle=%2Fa", b"valkeys://h?cluster=yes&ca_bundle=b"),
        (b"://", b"?", b"&", b"=", b"%", b"@", b"[", b"]", b"cluster", b"ca_bundle", b"yes", b"no"),
        1024,
    ),
    Target(
        "names",
        names,
        (
            b"127.0.0.1:7878",
            b"[::1]:0",
            b"t3of4.p0of2.g11",
            _HEX + b"/t0of1.p0of1.g0/" + _HEX + b"/0000000007",
            b"a/f/0000000003-xyz",
        ),
        (b"/", b":", b"%", b"..", b"t", b"of", b".p", b".g", b"0000000001"),
        1024,
    ),
)

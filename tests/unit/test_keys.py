"""Object keys: distinct for distinct ids, inside their folder, never too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Invalid
from kvstore.keys import MAX_KEY, MAX_SEGMENT, BlockKey, Keys, check_id, escape, gen_text, manifest_name, parse_gen

KEYS = Keys("prod/kv")
NS, LINK, FAMILY = "a" * 64, "b" * 64, "f" * 32


def test_b21_slash_and_underscore_are_different_sessions():
    names = [("t", "a/b"), ("t", "a_b"), ("t/a", "b"), ("t", "a%2Fb"), ("12", "3456"), ("1234", "56"), ("t", "a"), ("t", "A")]
    keys = {KEYS.name(tenant, name, NS, "main") for tenant, name in names}
    assert len(keys) == len(names)
    for tenant, name in names:  # deleting one session's folder keeps the others
        gone = {key for key in keys if key.startswith(KEYS.name_lanes(tenant, name))}
        assert gone == {KEYS.name(tenant, name, NS, "main")}


@pytest.mark.parametrize(
    "text",
    [
        "../../x",
        "%2e%2e/x",
        "..",
        ".",
        "",
        "\0",
        "a\0b",
        "a/../b",
        "a/./b",
        "/..",
        "%2E",
        "a%2F..%2Fb",
        "%00",
        "\n",
        "\x85",
        "\x7f",
        "%0A",
    ],
    ids=repr,
)
def test_b22_ids_that_would_leave_their_folder_are_refused(text):
    with pytest.raises(Invalid, match="session"):
        check_id(text, "session")


def test_b22_a_lone_surrogate_is_refused():
    with pytest.raises(Invalid):
        check_id("\ud800", "session")


@given(st.text(min_size=1, max_size=80))
def test_b22_nothing_is_written_outside_the_prefix(text):
    try:
        check_id(text, "session")
    except Invalid:
        return
    key = KEYS.name("tenant", text, NS, "main")
    assert key.startswith("prod/kv/names/tenant/")
    assert len(key.split("/")) == 7
    assert not {".", "..", ""} & set(key.split("/"))
    assert key.isascii()
    assert not set(key) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~%=/")


SEVEN = ["a b", "a+b", "a%2Bb", "x?y", "x#y", "~", "世界"]


def test_b23_seven_ids_are_seven_keys():
    assert len({escape(check_id(text, "id")) for text in SEVEN}) == 7
    assert escape("世界") == "%E4%B8%96%E7%95%8C"
    assert escape("a b") == "a%20b"


def test_b23_long_ids_stay_inside_the_limits():
    for tenant in ("t" * 300, "世" * 100, "t" * 512, "%" * 512):
        segment = escape(check_id(tenant, "tenant"))
        assert len(segment) <= MAX_SEGMENT
        assert segment.startswith("=")
        key = Keys("r" * 255).name(tenant, "s" * 512, NS, "main")
        assert len(key) <= MAX_KEY
    assert escape("t" * 300) != escape("t" * 301)
    with pytest.raises(Invalid):
        check_id("t" * 513, "tenant")


def test_b23_a_long_id_cannot_be_imitated():
    """The marker of the hashed form is one that the escaped form never emits."""
    long = escape("t" * 300)
    assert escape(long) == "%3D" + long[1:]


@given(st.lists(st.text(min_size=1, max_size=120), min_size=2, max_size=6, unique=True))
def test_b23_distinct_ids_never_share_a_key(ids):
    usable = []
    for text in ids:
        try:
            usable.append(check_id(text, "id"))
        except Invalid:
            continue
    assert len({escape(text) for text in usable}) == len(usable)


def test_dots_alone_are_an_id_that_no_store_cleans_away():
    assert escape(check_id("...", "id")) == "%2E%2E%2E"
    assert escape(check_id(".hidden", "id")) == ".hidden"


def test_block_keys_read_back():
    key = KEYS.block(NS, "t0of1.p0of1.g0", LINK, 57)
    assert key == f"prod/kv/blocks/{NS}/t0of1.p0of1.g0/{LINK}/0000000057"
    assert KEYS.parse_block(key) == BlockKey(NS, "t0of1.p0of1.g0", LINK, 57)
    assert key.startswith(KEYS.block_gens(NS, "t0of1.p0of1.g0", LINK))
    assert key.startswith(KEYS.namespace_blocks(NS))


@pytest.mark.parametrize(
    "key",
    [
        f"blocks/{NS}/t0of1.p0of1.g0/{LINK}/0000000057",
        f"prod/kv/blocks/{NS}/t0of1.p0of1.g0/{LINK}/57",
        f"prod/kv/blocks/{NS}/t0of1.p0of1.g0/{LINK}/000000005٧",
        f"prod/kv/blocks/{NS}/t0of1.p0of1.g0/{LINK}",
        f"prod/kv/blocks/{NS}/t0of1.p0of1.g0/{LINK}/0000000057/x",
        f"prod/kv/blocks/readme/t0of1.p0of1.g0/{LINK}/0000000057",
        "prod/kv/blocks/",
        "",
    ],
)
def test_foreign_keys_are_not_blocks(key):
    """The collector deletes what it takes for a block: better to leave a stranger alone."""
    assert KEYS.parse_block(key) is None


def test_other_keys_read_back():
    name = manifest_name(57, "0" * 32)
    manifest, head = KEYS.manifest("a/b", FAMILY, name), KEYS.head("a/b", FAMILY)
    assert KEYS.parse_manifest(manifest) == 57
    assert KEYS.manifest_of("a%2Fb", FAMILY, name) == manifest
    assert KEYS.parse_head(head) == ("a%2Fb", FAMILY)
    assert KEYS.parse_name(KEYS.name("a/b", "x y", NS, "main")) == ("x%20y", NS, "main")
    assert KEYS.parse_manifest(head) is KEYS.parse_head(manifest) is KEYS.parse_name(head) is None
    assert head.startswith(KEYS.heads("a/b"))
    assert head.startswith(KEYS.heads())


def test_generations_sort_by_age():
    gens = [0, 1, 9, 10, 99, 1_000_000, 9_999_999_999]
    texts = [gen_text(gen) for gen in gens]
    assert texts == sorted(texts)
    assert [parse_gen(text) for text in texts] == gens
    assert [parse_gen(text) for text in ("", "1", "00000000-1", "٠" * 10, "0" * 11)] == [None] * 5
    for gen in (-1, 10**10):
        with pytest.raises(Invalid):
            gen_text(gen)


@pytest.mark.parametrize("root", ["/a", "a/", "a//b", "a/../b", ".", "a b", "ü", "a%2Fb", "x" * 256])
def test_a_root_that_stores_might_rewrite_is_refused(root):
    with pytest.raises(Invalid):
        Keys(root)


def test_an_empty_root_is_the_bucket():
    assert Keys().format == "format.json"
    assert Keys("a/b=c").epoch == "a/b=c/epoch"

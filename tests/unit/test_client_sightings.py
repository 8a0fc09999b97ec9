"""What a client says a commit was built on: the latest it heard of that version, never a guess between two."""

from fakes.service import NS, links

from kvstore import api
from kvstore.client.sightings import Sightings

A, B = "a" * 32, "b" * 32
PROMISE = "a" * 16


def commit_of(base, blocks=1, first=0, **fields):
    return api.Commit(id="s", namespace=NS.id, base_version=base, blocks=links(blocks, first=first), **fields)


def receipt(version, branch, lane="main", durability="bucket", **fields):
    return api.Receipt(
        id="s", namespace=NS.id, lane=lane, version=version, tokens=16, blocks=1, durability=durability, branch=branch, **fields
    )


def session(version, branch, lane="main"):
    fields = {"tokens": 0, "blocks": 0, "bytes": 0, "updated": 0.0, "expires": 0.0, "ttl_s": 0, "sliding": True, "pinned": False}
    return api.Session(id="s", namespace=NS.id, lane=lane, version=version, branch=branch, labels={}, family="f", **fields)


def of(seen, commit):
    found = seen.base_of(commit)
    return found.branch, found.last


def test_a_receipt_says_the_session_and_the_commit_how_it_ends():
    seen = Sightings()
    seen.note(commit_of(0, 2), receipt(1, A))
    assert of(seen, commit_of(1, 3)) == (A, links(2)[-1].prefix_id)
    assert of(seen, commit_of(0)) == of(seen, commit_of(2)) == ("", "")


def test_of_a_commit_that_was_cut_or_is_in_a_longer_one_it_is_not_known_how_the_version_ends():
    seen = Sightings()
    seen.note(commit_of(0, 2), receipt(1, A, cut=True))
    assert of(seen, commit_of(1)) == (A, "")
    seen.note(commit_of(1, 2), receipt(1, A))
    assert of(seen, commit_of(1)) == (A, "")


def test_whoever_asks_again_builds_on_what_was_answered_then():
    """What was promised before may not have been kept."""
    seen = Sightings()
    seen.note(commit_of(0, 2), receipt(1, PROMISE, durability="nvme"))
    assert of(seen, commit_of(1)) == (PROMISE, links(2)[-1].prefix_id)
    seen.note(api.OfSession(id="s"), session(1, A))
    assert of(seen, commit_of(1)) == (A, "")


def test_promises_to_parallel_chains_that_name_no_lane_keep_apart():
    seen = Sightings()
    seen.note(commit_of(0), receipt(1, PROMISE, durability="dram"))
    seen.note(commit_of(0, first=7), receipt(1, "c" * 16, durability="dram"))
    assert of(seen, commit_of(1, 2)) == (PROMISE, links(1)[-1].prefix_id)
    assert of(seen, commit_of(1, 2, first=7)) == ("c" * 16, links(1, first=7)[-1].prefix_id)
    seen.note(api.OfSession(id="s"), session(1, A))  # `main` is the first one's
    assert of(seen, commit_of(1, 2))[0] == A
    assert of(seen, commit_of(1, 2, first=7)) == ("", "")
    seen.note(commit_of(0, first=7), receipt(1, B, lane=links(1, first=7)[0].prefix_id[:16]))
    assert of(seen, commit_of(1, 2, first=7))[0] == B

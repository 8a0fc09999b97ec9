"""The protocol with one rule broken, once for each rule. Each has to be caught, or the model does not check that rule."""

import msgspec

from protocol_model.rules import Rules


class Mutant(msgspec.Struct, frozen=True):
    """A broken rule, the scenario that has to catch it, and what it says when it does."""

    scenario: str
    rule: str
    broken: str
    rules: Rules
    caught_by: str = "a DELETE on its way may remove"


MUTANTS: dict[str, Mutant] = {
    "window_2": Mutant("base", "R1", "an added block may be two epochs old", Rules(window=2)),
    "any_age": Mutant("base", "R1", "an added block may be of any age", Rules(window=99)),
    "keep_unnamed": Mutant("base", "R1", "kept at any age because a manifest lists it, beyond `n`", Rules(keeps_only_named=False)),
    "no_generation": Mutant("base", "R1", "the key does not hold the generation", Rules(keys_carry_generation=False)),
    "old_manifest": Mutant("manifests", "R1", "a manifest may carry an older epoch", Rules(manifest_carries_own_epoch=False)),
    "epoch_first": Mutant("base", "R2", "the epoch is read before the head", Rules(epoch_after_head=False)),
    "keep_epoch": Mutant("base", "R2", "after a 412 the old epoch is used on", Rules(epoch_again_after_412=False)),
    "commit_on_sealed": Mutant("base", "R3", "opening is combined with adding", Rules(opens_before_adding=False)),
    "create_full": Mutant("create", "R3", "creating is combined with adding", Rules(creates_empty=False)),
    "no_seal": Mutant("base", "R4", "a collector only reads heads", Rules(seals=False)),
    "late_epoch": Mutant("base", "R4", "a collector reads the epoch after it seals", Rules(epoch_before_seals=False)),
    "early_sweep": Mutant("families", "R4", "deletes before every head is sealed", Rules(seals_every_head_first=False)),
    "unread_manifests": Mutant("manifests", "R4", "deletes before every manifest is read", Rules(reads_every_manifest_first=False)),
    "keep_1": Mutant("base", "R4", "deletes generations up to E-1", Rules(keep=1)),
    "history_unmarked": Mutant("history", "R4", "history entries are not marked", Rules(marks_history=False)),
    "skip_404": Mutant("manifests", "R5", "a missing manifest is passed over", Rules(reads_head_again_after_404=False)),
    "cross_fork": Mutant("families", "R6", "a fork names another family's objects", Rules(names_stay_in_family=False)),
    "copy_names_source": Mutant(
        "copies", "R6", "a copy is made beside the source, in its generation", Rules(copies_into_own_epoch=False)
    ),
    "copy_unchecked": Mutant("copies", "R6", "a COPY's 404 is not noticed", Rules(checks_copy=False), "which nobody wrote"),
    "reuse_family": Mutant("reap", "R7", "a creating PUT is sent again under the same id", Rules(family_ids_once=False)),
    "reuse_branch": Mutant("names", "R7", "a branch id is used again", Rules(branch_ids_once=False), "a stale"),
    "delete_name": Mutant("names", "R7", "a name is deleted with its session", Rules(name_stays=False), "not reachable"),
    "reap_name": Mutant(
        "names", "R7", "a name is deleted when it dangled for long", Rules(dangling_name_stays=False), "not reachable"
    ),
    "repeated_body": Mutant("base", "R8", "a body may repeat, so an ETag may", Rules(bodies_never_repeat=False)),
    "report_failed": Mutant("lost", "R8", "a lost answer is called a failure", Rules(lost_is_unknown=False), "reported failed"),
    "no_id_check": Mutant("lost", "R8", "a retry does not look for its id", Rules(looks_for_its_id=False), "took effect twice"),
    "no_ring_check": Mutant(
        "ring", "R8", "an id that may have left the ring is retried", Rules(distrusts_full_ring=False), "took effect twice"
    ),
    "seals_uncounted": Mutant(
        "ring", "R8", "a seal does not count as a swap", Rules(seals_count_as_swaps=False), "took effect twice"
    ),
    "false_conflict": Mutant(
        "merge", "R8", "a retry does not look for its id", Rules(looks_for_its_id=False), "answered with Conflict"
    ),
    "epoch_restored": Mutant("base", "R9", "the epoch goes back, as from a backup", Rules(epoch_only_grows=False)),
    "grow": Mutant("history", "R10", "a swap that is no commit makes a branch longer", Rules(only_commits_grow=False)),
    "reap_live": Mutant(
        "reap", "R11", "an empty head is deleted, not killed", Rules(kills_before_deleting=False), "in use and a DELETE"
    ),
    "reap_unnamed": Mutant(
        "names", "R11", "an empty head is deleted, not killed", Rules(kills_before_deleting=False), "was deleted"
    ),
    "reap_early": Mutant("reap", "R11", "a head is deleted as soon as it is dead", Rules(waits_before_deleting=False)),
    "name_first": Mutant(
        "names", "create", "the name is written before the branch", Rules(branch_before_name=False), "not reachable"
    ),
    "blind_claim": Mutant(
        "names", "create", "a claim does not name the value it judged", Rules(claims_what_it_judged=False), "not reachable"
    ),
    "blind_expire": Mutant(
        "ttl", "expire", "expiry does not name the head it judged", Rules(expires_what_it_judged=False), "was expired"
    ),
    "stale_base_wins": Mutant(
        "merge", "commit 6", "the last writer wins over a base it did not see", Rules(stale_base_conflicts=False), "overwritten"
    ),
    "redo_blindly": Mutant(
        "merge", "commit 6", "redone on any prefix of mine, a rewound one too", Rules(redo_looks_at_base=False), "came back"
    ),
    "redo_on_ends": Mutant(
        "merge", "commit 6", "a rewind between base and current is not noticed", Rules(redo_looks_between=False), "came back"
    ),
    "contained_by_length": Mutant(
        "merge", "commit 6", "acknowledged if as long", Rules(contained_compares_tokens=False), "is not stored"
    ),
    "contained_by_tokens": Mutant(
        "merge", "commit 6", "acknowledged though a shard is missing", Rules(contained_compares_shards=False), "is not stored"
    ),
    "drop_copies": Mutant(
        "merge", "commit 6", "mine replaces the copies of other shards", Rules(keeps_others_copies=False), "were dropped"
    ),
    "later_version": Mutant(
        "merge",
        "commit 6",
        "acknowledged as the current version, which may hold more than the caller saw",
        Rules(acknowledges_own_version=False),
        "overwritten",
    ),
    "growing_group": Mutant(
        "groups", "group", "a commit joins while the outcome is unknown", Rules(group_is_frozen=False), "is not stored"
    ),
    "branch_twice": Mutant(
        "groups", "group", "two commits of one branch in a group", Rules(branch_once_in_group=False), "is not stored"
    ),
    "nameless_member": Mutant(
        "repeats",
        "group",
        "a manifest does not tell whose commit made it",
        Rules(finds_a_members_version=False),
        "answered with Conflict",
    ),
}

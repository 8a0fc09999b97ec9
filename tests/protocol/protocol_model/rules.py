"""The MUSTs of docs/ordering.md, one field each. The defaults are the protocol; a mutant breaks exactly one."""

import msgspec


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What every process obeys. R1..R11 are the numbers in docs/ordering.md."""

    # R1, age
    window: int = 1  # an added block may be this many epochs older than the epoch its writer read
    keeps_only_named: bool = True  # what it keeps at any age is named by the head, not merely listed in a manifest beyond `n`
    keys_carry_generation: bool = True
    manifest_carries_own_epoch: bool = True
    # R2, order
    epoch_after_head: bool = True
    epoch_again_after_412: bool = True
    # R3, open
    opens_before_adding: bool = True
    creates_empty: bool = True
    # R4, seal
    seals: bool = True
    epoch_before_seals: bool = True
    seals_every_head_first: bool = True
    reads_every_manifest_first: bool = True
    keep: int = 2  # a collection at epoch E deletes only generations up to E - keep
    marks_history: bool = True
    # R5, complete marks
    reads_head_again_after_404: bool = True
    # R6, one head per family
    names_stay_in_family: bool = True
    copies_into_own_epoch: bool = True
    checks_copy: bool = True
    # R7, ids
    family_ids_once: bool = True  # a creating PUT is never sent again under the same id
    branch_ids_once: bool = True
    name_stays: bool = True
    dangling_name_stays: bool = True
    # R8, write ids
    bodies_never_repeat: bool = True
    lost_is_unknown: bool = True
    looks_for_its_id: bool = True
    distrusts_full_ring: bool = True
    seals_count_as_swaps: bool = True
    # R9, epoch
    epoch_only_grows: bool = True
    # R10, length
    only_commits_grow: bool = True
    # R11, dead heads
    kills_before_deleting: bool = True
    waits_before_deleting: bool = True
    # operations
    branch_before_name: bool = True
    claims_what_it_judged: bool = True
    expires_what_it_judged: bool = True
    # a commit that finds another version than its base (step 6)
    stale_base_conflicts: bool = True
    redo_looks_at_base: bool = True
    redo_looks_between: bool = True
    contained_compares_tokens: bool = True
    contained_compares_shards: bool = True
    keeps_others_copies: bool = True
    acknowledges_own_version: bool = True
    # a group
    group_is_frozen: bool = True
    branch_once_in_group: bool = True
    finds_a_members_version: bool = True

"""What vLLM's configuration says becomes a namespace and names; what cannot be held is refused with what to do."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from fake_vllm import MambaSpec, MLAAttentionSpec, Request, SlidingWindowSpec, configs, spec

from kvstore.connectors.vllm_names import Place, Settings, model_of
from kvstore.connectors.vllm_requests import Chain, usable_by, who
from kvstore.connectors.weights import weights_digest
from kvstore.errors import Invalid, Unsupported
from kvstore.ids import Group, Shard, chain

URL = "kvtier+unix:///run/kvtier/node.sock"


def model(torch, *parts, extra=None, **changes):
    return model_of(*configs(torch, *parts, **changes), Settings.parse({"url": URL, **(extra or {})}))


def test_a_configuration_becomes_a_namespace(torch):
    found = model(torch)
    ns = found.namespace
    assert (ns.model, ns.revision, ns.layers, ns.kv_heads, ns.head_dim, ns.dtype) == ("org/tiny", "a" * 40, 2, 2, 4, "BF16")
    assert (ns.layout, ns.block_tokens, ns.quantization, ns.tenant) == ("canonical", 256, "none", "default")
    assert ns.rope == '{"rope_theta":10000,"rope_type":"default"}'
    assert (found.pages, found.shards) == ((64,), [Shard()])


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/other"},
        {"hf_config": SimpleNamespace(_commit_hash="b" * 40)},
        {"rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"quantization": "fp8"},
        {"dtype": "other"},
        {"extra": {"revision": "trained on monday"}},
        {"extra": {"block_tokens": 512}},
        {"extra": {"url": URL + "?tenant=other"}},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_whatever_the_kv_depends_on_is_in_the_namespace(torch, change):
    if change.get("dtype"):
        change = {"dtype": torch.float16}
    assert model(torch, **change).namespace.id != model(torch).namespace.id


def test_ranks_and_stages_do_not_change_the_namespace(torch):
    alone = model(torch)
    split = model(torch, (spec(torch, heads=1), (0, 1)), tp=2)
    assert split.namespace == alone.namespace
    assert len(split.shards) == 2
    assert len(model(torch, pp=2).shards) == 2


def test_the_cpu_backend_has_opaque_blocks(torch):
    ns = model(torch, device="cpu").namespace
    assert ns.page_bytes == 64 * spec(torch).page_size_bytes
    assert ns.layout.endswith("/bs4")
    assert (ns.kv_heads, ns.head_dim) == (0, 0)


def test_groups_partition_the_layers(torch):
    found = model(torch, (spec(torch), (2, 5)), (spec(torch, SlidingWindowSpec, sliding_window=16), (0, 1, 3, 4)))
    assert found.namespace.groups == (Group(layers=(2, 5)), Group(kind="window", window=16, layers=(0, 1, 3, 4)))
    assert found.namespace.layers == 6
    one = model(torch, (spec(torch, SlidingWindowSpec, sliding_window=16), (7, 3)))
    assert one.namespace.groups == (Group(kind="window", window=16),)
    assert one.layer_names[0] == ("model.layers.3.self_attn.attn", "model.layers.7.self_attn.attn")


def test_which_worker_is_which():
    parallel = [SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=3, rank=rank) for rank in range(12)]
    assert [(place.rank, place.stage) for place in map(Place.of_worker, parallel)][:7] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(("page", "wanted", "found"), [(16, 0, 256), (512, 0, 512), (16, 48, 48), (128, 384, 384)])
def test_blocks_are_whole_blocks_of_the_engine(torch, page, wanted, found):
    model_ = model(torch, (spec(torch, page=page), (0,)), extra={"block_tokens": wanted})
    assert model_.namespace.block_tokens == found
    assert model_.pages == (found // page,)


@pytest.mark.parametrize(("page", "wanted", "remedy"), [(48, 0, 240), (16, 250, 256), (128, 100, 128), (16, 1 << 20, 8192)])
def test_blocks_that_do_not_divide_are_refused_with_one_that_does(torch, page, wanted, remedy):
    with pytest.raises(Invalid, match=f'"block_tokens": {remedy} '):
        model(torch, (spec(torch, page=page), (0,)), extra={"block_tokens": wanted})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}}, "dynamic"),
        ({"cache": {"enable_prefix_caching": False}}, "prefix caching"),
        ({"cache": {"calculate_kv_scales": True}}, "scales"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size"),
        ({"speculative": SimpleNamespace(method="eagle")}, "drafting"),
        ({"speculative": SimpleNamespace(method="draft_model")}, "drafting"),
        ({"specs": {"kind": MambaSpec}}, "MambaSpec"),
        ({"specs": {"head_size_v": 8}}, "different lengths"),
        ({"specs": {"state_content_bytes": 99}}, "packed"),
        ({"specs": {"kv_quant_mode": SimpleNamespace(name="NVFP4")}}, "packed"),
        ({"specs": {"dtype": "int8"}}, "int8"),
        ({"tp": 3}, "divide"),
    ],
    ids=str,
)
def test_what_cannot_be_held_is_refused(torch, changes, says):
    parts = ((spec(torch, **changes.pop("specs", {})), (0, 1)),)
    extra = {name: changes.pop(name, {}) for name in ("cache", "parallel")}
    speculative = changes.pop("speculative", None)
    vllm_config, kv_cache_config = configs(torch, *parts, **changes)
    vars(vllm_config.cache_config).update(extra["cache"])
    vars(vllm_config.parallel_config).update(extra["parallel"])
    vllm_config.speculative_config = speculative
    with pytest.raises(Unsupported, match=says) as refused:
        model_of(vllm_config, kv_cache_config, Settings(url=URL))
    (shown,) = refused.value.__notes__  # under the traceback, which is all that an engine prints
    assert shown == f"What to do: {refused.value.remedy}"


def test_drafts_without_kv_of_their_own_are_none_of_the_connectors_business(torch):
    vllm_config, kv_cache_config = configs(torch)
    plain = model_of(vllm_config, kv_cache_config, Settings(url=URL))
    vllm_config.speculative_config = SimpleNamespace(method="ngram")
    assert model_of(vllm_config, kv_cache_config, Settings(url=URL)) == plain


def test_groups_of_different_shapes_are_refused(torch):
    with pytest.raises(Unsupported, match="shapes"):
        model(torch, (spec(torch), (0,)), (spec(torch, SlidingWindowSpec, dim=8, sliding_window=4), (1,)))


def test_weights_are_named_by_the_user_by_their_files_or_by_a_commit(torch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = model(torch, model=str(tmp_path)).namespace
    assert (found.model, found.revision) == (tmp_path.name, weights_digest(tmp_path))
    assert model(torch, model=str(tmp_path), extra={"revision": "v2"}).namespace.revision == "v2"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(Invalid, match='"revision"'):
        model(torch, model=str(tmp_path))
    with pytest.raises(Invalid, match="which weights"):
        model(torch, hf_config=SimpleNamespace(), revision="main")
    assert model(torch, hf_config=SimpleNamespace(), revision="c" * 40).namespace.revision == "c" * 40


def test_settings_are_checked_and_the_message_names_the_known_ones():
    with pytest.raises(Invalid, match=r"`url`.*it takes url, save"):
        Settings.parse({})
    with pytest.raises(Invalid, match="sesions"):
        Settings.parse({"url": URL, "save": "sesions"})
    with pytest.raises(Invalid, match="minimum"):
        Settings.parse({"url": URL, "minimum": 3})
    assert Settings.parse({"url": URL, "decode": False}) == Settings(url=URL, decode=False)


# --- names of blocks ---


def names(torch, request, tokens=None, block_tokens=8):
    namespace = msgspec.structs.replace(model(torch).namespace, block_tokens=block_tokens)
    return [link.prefix_id for link in Chain(namespace, request).upto(tokens or request.num_tokens)]


def item(identifier, offset, length):
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_names_are_the_chain_of_the_tokens_and_grow_with_them(torch):
    namespace = msgspec.structs.replace(model(torch).namespace, block_tokens=8)
    request = Request("a", range(20))
    made = Chain(namespace, request)
    assert list(made.upto(15)) == chain(namespace, np.arange(20))[:1]
    assert list(made.upto(99)) == chain(namespace, np.arange(20))
    request.all_token_ids += range(20, 30)
    assert list(made.upto(25)) == chain(namespace, np.arange(24))
    assert list(made.upto(8)) == chain(namespace, np.arange(8))


def test_a_salt_or_an_adapter_changes_every_name(torch, tmp_path):
    tokens = range(24)
    lora = SimpleNamespace(lora_name="l", lora_path=str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    found = [
        names(torch, Request("a", tokens)),
        names(torch, Request("a", tokens, salt="s")),
        names(torch, Request("a", tokens, salt="t")),
        names(torch, Request("a", tokens, lora=lora)),
        names(torch, Request("a", tokens, lora=lora, salt="s")),
        names(torch, Request("a", tokens, lora=SimpleNamespace(lora_name="l", lora_path="elsewhere"))),
    ]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two, trained anew")
    found.append(names(torch, Request("a", tokens, lora=lora)))
    assert len({name for each in found for name in each}) == 3 * len(found)


def test_images_never_collide_and_the_text_before_them_is_shared(torch):
    """B19: ids that end alike, items that change places, borders that move."""
    tokens = [7] * 40
    variants = {
        "one": [item("x1", 10, 10)],
        "ends alike": [item("y1", 10, 10)],
        "a token later": [item("x1", 11, 10)],
        "two": [item("x1", 10, 5), item("x2", 15, 5)],
        "two the other way round": [item("x2", 10, 5), item("x1", 15, 5)],
        "joined": [item("x1x2", 10, 10)],
        "offset as part of the id": [item("x12", 10, 10)],
    }
    found = {text: names(torch, Request("a", tokens, items=items)) for text, items in variants.items()}
    assert len({each[0] for each in found.values()}) == 1
    for block in range(1, 5):
        assert len({each[block] for each in found.values()}) == len(variants)


def test_an_item_is_part_of_every_block_that_has_tokens_of_it(torch):
    tokens, picture = [7] * 40, [item("x", 4, 24)]
    plain, with_it = names(torch, Request("a", tokens)), names(torch, Request("a", tokens, items=picture))
    assert not set(plain) & set(with_it)
    late = names(torch, Request("a", tokens, items=[item("x", 36, 4)]))
    assert late[:4] == plain[:4]
    assert late[4] != plain[4]


# --- sessions ---


@pytest.mark.parametrize(
    ("own", "params", "extra", "session"),
    [
        ("own", {"session_id": "params"}, {"session_id": "extra"}, "own"),
        (None, {"session_id": "params"}, {"session_id": "extra"}, "params"),
        (None, None, {"session_id": "extra"}, "extra"),
        (None, {"X-Session-Id": "header"}, None, "header"),
    ],
)
def test_where_a_session_id_comes_from(own, params, extra, session):
    request = Request("a", [1], session=own, params=params)
    request.sampling_params = SimpleNamespace(extra_args=extra)
    assert who(request).session == session


def test_no_session_and_parents_and_lanes():
    assert who(Request("a", [1])) is None
    found = who(Request("a", [1], session="s", params={"parent_session_id": "p", "lane": "left"}))
    assert (found.session, found.parent, found.lane) == ("s", "p", "left")


def test_what_does_not_follow_from_tokens_is_left_alone():
    request = Request("a", [1])
    assert usable_by(request)
    request.prompt_embeds = object()
    assert not usable_by(request)


def test_mla(torch):
    ns = model(torch, (spec(torch, MLAAttentionSpec, dim=12), (0, 1)), tp=2).namespace
    assert (ns.mla_rank, ns.mla_rope, ns.kv_heads) == (8, 4, 0)

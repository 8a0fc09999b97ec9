"""Where bytes go: into the canonical layout and back, whatever the strides of the engine's memory; on a device by the same code."""

import numpy as np
import pytest
from fake_vllm import MLAAttentionSpec, configs, spec

from kvstore import codec
from kvstore.connectors.vllm_device import DevicePages
from kvstore.connectors.vllm_layout import HostPages
from kvstore.connectors.vllm_messages import NOWHERE, Load, Report, packed
from kvstore.connectors.vllm_names import Settings, model_of
from kvstore.errors import Unsupported
from kvstore.ids import BlockName, Link, Shard, chain

BLOCKS, PAGE, TOKENS = 7, 4, 12
KINDS = {"host": HostPages, "device": DevicePages}
SHAPES = {
    "one head": {"heads": 1, "dim": 8},
    "grouped heads": {"heads": 3, "dim": 4},
    "float32": {"heads": 2, "dim": 4, "dtype": "float32"},
    "fp8": {"heads": 2, "dim": 4, "dtype": "float8_e4m3fn"},
}
ORDERS = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3), "heads outermost": (1, 0, 2, 3)}


def namespace_of(torch, *parts, device="cuda", heads=2, block_tokens=TOKENS):
    settings = Settings(url="memory://x", block_tokens=block_tokens)
    return model_of(*configs(torch, *parts, device=device, heads=heads, blocks=BLOCKS), settings).namespace


def cache(torch, shape, order, dtype, seed):
    """A layer's cache of random bits, [blocks, heads, tokens, content] with its axes in `order` in memory."""
    rng = np.random.default_rng(seed)
    width = getattr(torch, dtype).itemsize
    flat = torch.from_numpy(rng.integers(0, 256, (*(shape[axis] for axis in order[:-1]), shape[3] * width), np.uint8))
    return flat.view(getattr(torch, dtype)).permute(*np.argsort(order))


@pytest.fixture
def bits(torch):
    """A tensor's bytes, u8 [n]."""
    return lambda tensor: tensor.contiguous().view(-1).view(torch.uint8).numpy()


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_keys_and_values_lie_canonically_and_come_back_bit_by_bit(torch, bits, kind, order, fields, parts):
    each = spec(torch, **fields)
    namespace = namespace_of(torch, (each, (0, 1)), heads=each.num_kv_heads)
    plan = codec.layout(namespace, Shard(), TOKENS)
    dtype, dim = fields.get("dtype", "bfloat16"), each.head_size
    shape = (BLOCKS * parts, each.num_kv_heads, PAGE // parts, 2 * dim)  # vLLM may cut its blocks for a kernel
    layers = [cache(torch, shape, order, dtype, seed) for seed in (1, 2)]
    pages = kind(plan, layers, namespace, BLOCKS, TOKENS // PAGE)
    raw = bytearray(plan.raw_bytes)
    chosen, tokens = [5, 1, 3], np.arange(TOKENS, dtype=np.uint32)
    pages.read(chosen, tokens, memoryview(raw)[plan.header_bytes :], pages.mark())

    (link,) = chain(namespace, tokens)
    name = BlockName(namespace.id, Shard(), link.prefix_id, TOKENS)
    codec.seal(memoryview(raw), name, namespace)
    stored = codec.tensors(memoryview(raw), name, namespace)
    for number, layer in enumerate(layers):
        whole = layer.unflatten(0, (BLOCKS, parts))[chosen].permute(0, 1, 3, 2, 4).reshape(TOKENS, each.num_kv_heads, 2 * dim)
        for part, expected in (("k", whole[..., :dim]), ("v", whole[..., dim:])):
            assert np.array_equal(np.ascontiguousarray(stored[f"layers.{number}.{part}"]).view(np.uint8).ravel(), bits(expected))
    assert stored["token_ids"].tolist() == list(range(TOKENS))

    empty = [torch.zeros_like(layer) for layer in layers]
    other = kind(plan, empty, namespace, BLOCKS, TOKENS // PAGE)
    other.write([2, NOWHERE, 6], memoryview(raw), other.mark())
    for layer, copy in zip(layers, empty, strict=True):
        had, got = layer.unflatten(0, (BLOCKS, parts)), copy.unflatten(0, (BLOCKS, parts))
        assert np.array_equal(bits(got[[2, 6]]), bits(had[[5, 3]]))
        assert not bits(got[[0, 1, 3, 4, 5]]).any()


def test_the_latent_of_mla(torch, bits, kind):
    each = spec(torch, MLAAttentionSpec, dim=12)
    namespace = namespace_of(torch, (each, (0,)))
    plan = codec.layout(namespace, Shard(), TOKENS)
    layer = cache(torch, (BLOCKS, 1, PAGE, 12), (0, 1, 2, 3), "bfloat16", 1)
    pages = kind(plan, [layer], namespace, BLOCKS, 3)
    payload = bytearray(plan.payload_bytes)
    pages.read([4, 0, 2], np.zeros(TOKENS, np.uint32), memoryview(payload), pages.mark())
    assert payload[: plan.sizes[0]] == bits(layer[[4, 0, 2]]).tobytes()
    copy = torch.zeros_like(layer)
    pages = kind(plan, [copy], namespace, BLOCKS, 3)
    pages.write([4, 0, 2], memoryview(bytearray(plan.header_bytes) + payload), pages.mark())
    assert np.array_equal(bits(copy[[4, 0, 2]]), bits(layer[[4, 0, 2]]))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_an_opaque_block_is_its_bytes_as_they_lie(torch, bits, order):
    each = spec(torch, heads=3, dtype="float32")
    namespace = namespace_of(torch, (each, (0, 1)), device="cpu", heads=3)
    assert namespace.page_bytes == 3 * each.page_size_bytes
    plan = codec.layout(namespace, Shard(), TOKENS)
    layers = [cache(torch, (BLOCKS, 3, PAGE, 8), order, "float32", seed) for seed in (1, 2)]
    pages = HostPages(plan, layers, namespace, BLOCKS, 3)
    payload = bytearray(plan.payload_bytes)
    pages.read([6, 0, 2], np.zeros(TOKENS, np.uint32), memoryview(payload), pages.mark())
    lying = layers[0].permute(0, *order[1:])
    assert payload[: plan.sizes[0]] == bits(lying[[6, 0, 2]]).tobytes()
    empty = [torch.zeros_like(layer) for layer in layers]
    pages = HostPages(plan, empty, namespace, BLOCKS, 3)
    pages.write([6, 0, 2], memoryview(bytearray(plan.header_bytes) + payload), None)
    assert all(np.array_equal(bits(copy[[6, 0, 2]]), bits(layer[[6, 0, 2]])) for copy, layer in zip(empty, layers, strict=True))


def test_caches_of_layers_that_share_one_allocation(torch, bits, kind):
    """vLLM may put a block of all layers together: a layer's blocks are then far apart."""
    each = spec(torch)
    namespace = namespace_of(torch, (each, (0, 1)))
    plan = codec.layout(namespace, Shard(), TOKENS)
    both = cache(torch, (BLOCKS * 2, 2, PAGE, 8), (0, 2, 1, 3), "bfloat16", 1).unflatten(0, (BLOCKS, 2))
    pages = kind(plan, [both[:, 0], both[:, 1]], namespace, BLOCKS, 3)
    payload = bytearray(plan.payload_bytes)
    pages.read([1, 2, 3], np.zeros(TOKENS, np.uint32), memoryview(payload), pages.mark())
    expected = both[[1, 2, 3], 1].transpose(1, 2).reshape(TOKENS, 2, 8)[..., 4:]
    assert payload[plan.offsets[3] :][: plan.sizes[3]] == bits(expected).tobytes()


def test_memory_that_is_laid_out_otherwise_is_refused(torch):
    each = spec(torch)
    namespace = namespace_of(torch, (each, (0,)))
    plan = codec.layout(namespace, Shard(), TOKENS)
    for shape in ((2, BLOCKS, 2, PAGE, 8), (BLOCKS, 2, PAGE, 6), (BLOCKS + 1, 2, PAGE, 8), (BLOCKS, 3, PAGE, 8)):
        with pytest.raises(Unsupported):
            HostPages(plan, [torch.zeros(shape, dtype=torch.bfloat16)], namespace, BLOCKS, 3)
    with pytest.raises(Unsupported):
        HostPages(plan, [torch.zeros((BLOCKS, 2, PAGE, 8))], namespace, BLOCKS, 3)
    opaque = namespace_of(torch, (each, (0,)), device="cpu")
    scattered = torch.zeros((2, BLOCKS, PAGE, 8), dtype=torch.bfloat16).permute(1, 0, 2, 3)
    with pytest.raises(Unsupported, match="together"):
        HostPages(codec.layout(opaque, Shard(), TOKENS), [scattered], opaque, BLOCKS, 3)


def test_links_travel_whole():
    links = [Link("ab" * 32, 8), Link("cd" * 32, 8)]
    assert Load("r", packed(links), 8, ((1, 2),), 0).links == links
    both = Report(saved={1: (2,)}, lost={"r": (1,)}).with_(Report(saved={1: (1,), 2: (3,)}))
    assert both == Report(saved={1: (2, 1), 2: (3,)}, lost={"r": (1,)})

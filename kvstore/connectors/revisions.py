"""Which weights an engine runs, told from what it was given as its model."""

from __future__ import annotations

from pathlib import Path, PurePath

from kvstore.connectors.weights import weights_digest
from kvstore.errors import Invalid


def model_name(model: str) -> str:
    """What a model is called on every machine: of a local folder the last part, else its id."""
    return PurePath(model).name if model.startswith((".", "/", "~")) or Path(model).is_dir() else model


def weights_revision(model: str, given: str = "") -> str:
    """A name for exactly these weights.

    Args:
        model: A folder, or an id of a hub.
        given: What the user says it is; used as it is.

    Returns:
        What was given, or a digest of a sample of a folder's files.

    Raises:
        Invalid: Nothing tells which weights these are. An id does not: which of its commits an engine loaded is not seen from
            here, and KV of one must not meet another.
    """
    if given:
        return given
    remedy = 'set "revision" in the connector\'s settings, such as the commit that the engine was told to load'
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise Invalid(f"which weights does {model!r} stand for? They may change under that name: {remedy}")
    try:
        return weights_digest(folder)
    except (OSError, ValueError) as error:
        raise Invalid(f"which weights are these? {error}: {remedy}") from None

"""Which weights an engine runs, told from what it was given as its model."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from kvstore.connectors.weights import weights_digest
from kvstore.errors import Invalid


def model_name(model: str) -> str:
    """What a model is called on every machine: of a local folder the last part, else its id."""
    return PurePath(model).name if model.startswith((".", "/", "~")) or Path(model).is_dir() else model


def weights_revision(model: str, given: str = "") -> str:
    """A name for exactly these weights.

    Args:
        model: A folder, or an id of the Hugging Face hub.
        given: What the user says it is; used as it is.

    Returns:
        What was given; or a digest of a sample of a folder's files; or the commit of the hub's local copy.

    Raises:
        Invalid: Nothing tells which weights these are.
    """
    if given:
        return given
    folder, remedy = Path(model).expanduser(), 'set "revision" in the connector\'s extra config'
    try:
        commit = weights_digest(folder) if folder.is_dir() else _hub_commit(model)
    except (OSError, ValueError) as error:
        raise Invalid(f"{error}: {remedy}") from None
    if commit is None:
        raise Invalid(f"nothing tells which weights {model!r} are: {remedy}")
    return commit


def _hub_commit(model: str) -> str | None:
    cache = os.environ.get("HF_HUB_CACHE") or str(Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    ref = Path(cache).expanduser() / f"models--{model.replace('/', '--')}" / "refs" / "main"
    try:
        return ref.read_text().strip() or None
    except OSError:
        return None

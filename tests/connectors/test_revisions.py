"""Other weights, another name; the same weights, the same name wherever they lie."""

import shutil

import numpy as np
import pytest

from kvstore.connectors.revisions import model_name, weights_revision
from kvstore.errors import Invalid


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "Tiny-1B"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model-1.safetensors").write_bytes(np.random.default_rng(1).bytes(3_000_000))
    (made / "model-2.safetensors").write_bytes(b"short")
    return made


def test_a_copy_has_the_same_name_and_a_change_another(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "Tiny-1B")
    before = weights_revision(str(folder))
    assert weights_revision(str(copy)) == before
    (copy / "model-2.safetensors").write_bytes(b"Short")
    assert weights_revision(str(copy)) != before


def test_what_was_given_is_used(folder):
    assert weights_revision(str(folder), "v7") == "v7"


def test_an_id_of_a_hub_stands_for_any_of_its_commits(tmp_path, monkeypatch):
    """The local copy's `main` may not be what the engine was told to load."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("abc123\n")
    with pytest.raises(Invalid, match="which weights"):
        weights_revision("org/model")
    assert weights_revision("org/model", "abc123") == "abc123"


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(Invalid, match="holds no weights"):
        weights_revision(str(tmp_path))


def test_a_model_is_called_alike_on_every_machine(folder):
    assert model_name(str(folder)) == "Tiny-1B"
    assert model_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nestmodel import ConfigError, NestModel, WeightsError, export_model, import_model, load_network, read_config
from nestmodel.formats.hub import HubModel, parse_hub_name
from tests.extras import needs
from tests.nestmodel.formats.hub_server import COMMIT, Hub, serving
from tests.nestmodel.formats.models import CONFIG, assert_equal_states, checkpoint

needs_hub = needs("hub", "huggingface_hub")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on loopback, which the client uses in this process, with an empty cache."""
    from huggingface_hub import constants

    with serving(Hub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def nemo_file(directory: Path) -> bytes:
    _, path = checkpoint(directory)
    return export_model(path, "nemo", directory / "model.nemo").read_bytes()


@needs_hub
def test_a_network_is_loaded_by_name_once_and_then_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    network, _ = checkpoint(tmp_path)
    hub.repositories["me/nest"] = {"model.nemo": nemo_file(tmp_path)}
    loaded = load_network("hf://me/nest@main")
    assert_equal_states(loaded, network)
    assert loaded.source == f"me/nest at {COMMIT} on the Hugging Face hub"
    # A `Path`, which the commands make of their arguments, has lost a slash.
    assert read_config(Path("hf://me/nest/model.nemo")) == replace(CONFIG, seed=0)  # a `.nemo` file has no seed
    assert_equal_states(NestModel(CONFIG, Path("hf://me/nest")), network)
    assert [path for method, path in hub.requests if method == "GET" and path.endswith(".nemo")] == [
        f"/me/nest/resolve/{COMMIT}/model.nemo"
    ]


@needs_hub
def test_training_starts_from_an_export_for_hugging_face_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    network, path = checkpoint(tmp_path)
    folder = export_model(path, "huggingface", tmp_path / "exported")
    hub.repositories["me/encoder"] = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name in ("hf://me/encoder", "hf://me/encoder/model.safetensors"):
        assert_equal_states(NestModel(CONFIG, Path(name), "encoder"), network, "encoder.")


@needs_hub
def test_without_a_connection_the_cache_is_used(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    network, _ = checkpoint(tmp_path)
    hub.repositories["me/nest"] = {"model.nemo": nemo_file(tmp_path)}
    hub.repositories["me/other"] = dict(hub.repositories["me/nest"])
    load_network("hf://me/nest@main")
    with serving(Hub()) as gone:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", gone.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", gone.url + "/{repo_id}/resolve/{revision}/{filename}")
    assert_equal_states(load_network(f"hf://me/nest@{COMMIT}"), network)
    for name in ("hf://me/other", "hf://me/other/model.nemo"):
        with pytest.raises(
            WeightsError, match=r"me/other on the Hugging Face hub: cannot be downloaded, and is not in the cache"
        ):
            load_network(name)


@needs_hub
def test_what_cannot_be_downloaded_is_explained(hub: Hub, tmp_path: Path) -> None:
    hub.repositories |= {
        "me/two": {"a.nemo": b"", "b.nemo": b"", "c.ckpt": b""},
        "me/none": {"README.md": b"", "pytorch_model.bin": b"", "../escape.nemo": b"", "-rf.nemo": b""},
        "me/gated": {"model.nemo": b""},
        "me/text": {"model.nemo": b"text"},
    }
    hub.gated.add("me/gated")
    for name, message in {
        "me/gone": "me/gone on the Hugging Face hub: cannot be downloaded, .*hf auth login",
        "me/two": r"has 2 \.nemo files \(a\.nemo, b\.nemo\)\. Name one: hf://OWNER/NAME/a\.nemo",
        "me/none": r"has no \.nemo, \.ckpt, \.safetensors file",
        "me/gated": "cannot be downloaded.*accept its terms",
        "me/two@v2": "me/two at v2 on the Hugging Face hub: cannot be downloaded",
        "me/two/c.nemo": "cannot be downloaded",
        "me/text": "model.nemo: neither a .nemo file",
    }.items():
        with pytest.raises(WeightsError, match=message):
            import_model(f"hf://{name}", tmp_path / "model.ckpt")
    assert not (tmp_path / "model.ckpt").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("nest", "me/../nest", "-me/nest", "me/nest@-x", "me/$(id)", "me/nest\n", "user:secret@me/nest"),
        "me/" + "n" * 200,
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="is not the name of a model on the Hugging Face hub"):
        load_network(f"hf://{name}")


def test_names_have_a_revision_and_a_file() -> None:
    assert parse_hub_name("hf://me/nest") == HubModel("me", "nest")
    assert parse_hub_name("hf:/me/nest@v1.0") == HubModel("me", "nest", "v1.0")
    assert parse_hub_name("hf://me/nest@v1/a/b.nemo") == HubModel("me", "nest", "v1", "a/b.nemo")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'nest-pretrain\[hub\]'"):
        load_network("hf://me/nest")

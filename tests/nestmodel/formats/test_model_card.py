import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import yaml

from nestdata import OutputError
from nestmodel import (
    ExportFormat,
    NestConfig,
    NestModel,
    NestNetwork,
    encode,
    export_model,
    load_network,
    load_weights,
)
from nestmodel.formats.model_card import Training, escaped, model_card
from tests.conftest import MessyCorpora
from tests.nestmodel.formats.models import CONFIG, STREAMING, assert_equal_states, checkpoint
from tests.synthesis import chirp
from tests.training import messy_data, trainer

HOSTILE = "a|b](https://evil.test) <script>x</script> `c` ---\n# title\n![p](x) www.evil.test me@evil.test \x1b[31m"


def header_of(card: str) -> Any:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_of_a_checkpoint_says_what_it_was_trained_on(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    model = NestModel(CONFIG)
    runner = trainer(tmp_path, max_steps=2, val_check_interval=1, limit_val_batches=1)
    runner.fit(model, datamodule=messy_data(messy_corpora))
    runner.save_checkpoint(tmp_path / "last.ckpt")
    card = (export_model(tmp_path / "last.ckpt", "huggingface", tmp_path / "encoder") / "README.md").read_text()
    assert header_of(card)["library_name"] == "transformers"
    assert "# license:\n" in card
    record = torch.load(tmp_path / "last.ckpt", weights_only=True)["nest_training"]
    assert record["speech"].startswith(f"{messy_corpora.speech.name} (")
    assert record["noise"].startswith(f"{messy_corpora.noise.name} (")
    for name in ("speech", "noise", "last training step", "last validation"):
        assert f"| {name} | {escaped(record[name])} |" in card
    assert record["last validation"].startswith("after step 2: loss ")
    assert "| optimizer steps | 2 |" in card
    assert "| data.plan.max\\_batch\\_seconds | " in card
    assert str(tmp_path) not in card


@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::huggingface_hub")
@pytest.mark.parametrize("to", [pytest.param("huggingface", marks=pytest.mark.slow), "nemo", "safetensors"])
def test_the_lines_of_the_card_load_the_model(
    to: ExportFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if to == "huggingface":
        pytest.importorskip("transformers")
    _, path = checkpoint(tmp_path)
    exported = export_model(path, to, tmp_path / "model", parts="encoder" if to == "huggingface" else "all")
    card = exported / "README.md" if to == "huggingface" else exported.with_name("model.md")
    code, *ctc = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    monkeypatch.chdir(card.parent)
    soundfile.write("talk.wav", chirp(100, 3000, 1.3), 16000, subtype="FLOAT")
    scope: dict[str, Any] = {}
    exec(code, scope)
    frames = scope["frames"].detach().reshape(-1, CONFIG.encoder.d_model)
    # transformers computes the same values in another order.
    torch.testing.assert_close(frames, encode(path, "talk.wav").values, rtol=0, atol=1e-4)
    assert len(ctc) == (to == "huggingface")
    if ctc:
        exec(ctc[0], scope)
        weights, encoder = scope["recogniser"].state_dict(), scope["encoder"].state_dict()
        assert weights.keys() == {*(f"encoder.{name}" for name in encoder), "ctc_head.weight", "ctc_head.bias"}
        assert all(torch.equal(value, weights[f"encoder.{name}"]) for name, value in encoder.items())
        assert len(weights["ctc_head.weight"]) == scope["recogniser"].config.vocab_size == 1024
        # What transformers has saved is read back, of a model with a head as well.
        for name in ("encoder", "recogniser"):
            scope[name].save_pretrained(name)
            network = NestNetwork(replace(CONFIG, seed=6))
            assert load_weights(network, f"{name}/model.safetensors", "encoder").missing == ()
            assert_equal_states(network, load_network(path), "encoder.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::huggingface_hub")
@pytest.mark.parametrize("config", [CONFIG, STREAMING], ids=["whole", "streaming"])
def test_a_ctc_model_without_a_configuration_is_an_error(config: NestConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    exported = export_model(NestNetwork(config), "huggingface", tmp_path / "model")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # of 24 x 1024, as the card says
        transformers.ParakeetForCTC.from_pretrained(exported, vocab_size=8, pad_token_id=0)


def test_a_resumed_run_keeps_its_last_validation(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    first = trainer(tmp_path, max_steps=1, val_check_interval=1, limit_val_batches=1)
    first.fit(NestModel(CONFIG), datamodule=messy_data(messy_corpora))
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = trainer(tmp_path, max_steps=2, limit_val_batches=0)
    second.fit(NestModel(CONFIG), datamodule=messy_data(messy_corpora), ckpt_path=tmp_path / "one.ckpt")
    second.save_checkpoint(tmp_path / "two.ckpt")
    before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "two.ckpt"))
    assert after["nest_training"]["last validation"] == before["nest_training"]["last validation"]


def test_hostile_text_of_a_checkpoint_stays_text() -> None:
    record, expected = (Training(facts={"steps": text, text: "x"}, settings={text: text}) for text in (HOSTILE, "x"))
    harmless = "x"
    cards = [
        model_card(title, CONFIG, one, to="nemo", parts="all", source=title)
        for title, one in ((HOSTILE, record), (harmless, expected))
    ]
    hostile, plain = cards
    assert len(hostile.splitlines()) == len(plain.splitlines())
    assert header_of(hostile) == header_of(plain)
    assert "| steps | x |" in plain
    for text in ("<script", "](https://evil", "![", "\n# title", "www.", "me@", "\x1b", " `c`"):
        assert text not in hostile
    assert escaped("a_b|c") == "a\\_b\\|c"
    assert len(escaped("a" * 10_000)) < 300


def test_a_file_in_the_place_of_the_card_is_kept(tmp_path: Path) -> None:
    _, path = checkpoint(tmp_path)
    (tmp_path / "out.nemo.md").write_text("mine")
    with pytest.raises(OutputError, match=r"out\.nemo\.md: exists already"):
        export_model(path, "nemo", tmp_path / "out.nemo")
    assert (tmp_path / "out.nemo.md").read_text() == "mine"
    assert not (tmp_path / "out.nemo").exists()

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import yaml

from nestmodel import ExportFormat, NestModel, NestNetwork, encode, export_model, load_network, load_weights
from nestmodel.formats.model_card import Training, escaped, model_card
from tests.conftest import MessyCorpora
from tests.nestmodel.formats.models import CONFIG, assert_equal_states, checkpoint
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
    resumed = trainer(tmp_path, max_steps=3, limit_val_batches=0)
    resumed.fit(NestModel(CONFIG), datamodule=messy_data(messy_corpora), ckpt_path=tmp_path / "last.ckpt")
    resumed.save_checkpoint(tmp_path / "resumed.ckpt")
    after = torch.load(tmp_path / "resumed.ckpt", weights_only=True)["nest_training"]
    assert after["last validation"] == record["last validation"]


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


def test_hostile_text_of_a_checkpoint_stays_text() -> None:
    def card_of(text: str) -> str:
        record = Training(facts={"steps": text, text: "x"}, settings={text: text})
        return model_card(text, CONFIG, record, to="nemo", parts="all", source=text)

    hostile, plain = card_of(HOSTILE), card_of("x")
    assert len(hostile.splitlines()) == len(plain.splitlines())
    assert header_of(hostile) == header_of(plain)
    assert "| steps | x |" in plain
    for text in ("<script", "](https://evil", "![", "\n# title", "www.", "me@", "\x1b", " `c`"):
        assert text not in hostile
    assert escaped("a_b|c") == "a\\_b\\|c"
    assert len(escaped("a" * 10_000)) < 300

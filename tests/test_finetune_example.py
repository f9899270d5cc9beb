"""Runs examples/finetune_ctc on the demo corpus: from pretraining to the text of a WAV."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nestcli.nestmodel import main as nestmodel
from nestdata import Corpus, prepare_corpus
from nestmodel import NestNetwork, normalise_text
from nestmodel.formats.huggingface import write_huggingface
from tests.test_examples import load
from tests.training import tiny_config

pytest.importorskip("accelerate")
pytest.importorskip("jiwer")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:::accelerate", "ignore:::huggingface_hub", "ignore:::transformers"),
]
DEMO = Path(__file__).parents[1] / "manifests" / "demo"
STEPS = 6


@pytest.fixture(scope="module")
def finetune() -> ModuleType:
    return load("finetune_ctc/finetune")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    directory = tmp_path_factory.mktemp("demo") / "speech.corpus"
    prepare_corpus([DEMO / "speech.json"], directory)
    return Corpus.open(directory)


def pretrain_and_export(directory: Path) -> Path:
    """Returns the directory of an encoder that a few steps of `nestmodel fit` trained."""
    for name in ("speech", "noise"):
        prepare_corpus([DEMO / f"{name}.json"], directory / f"{name}.corpus")
    small = {"encoder.d_model": 16, "encoder.num_heads": 2, "encoder.num_layers": 1, "encoder.subsampling_channels": 8}
    flags = {
        "data.corpus": directory / "speech.corpus",
        "data.noise": directory / "noise.corpus",
        "trainer.max_steps": 2,
        "trainer.accelerator": "cpu",
        "trainer.default_root_dir": directory / "run",
        **{f"model.config.{name}": value for name, value in small.items()},
    }
    assert nestmodel(["fit", "--config", "demo", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    checkpoint = directory / "run" / "version_0" / "checkpoints" / "last.ckpt"
    assert nestmodel(["export", str(checkpoint), "--to", "huggingface", "-o", str(directory / "encoder")]) == 0
    return directory / "encoder"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_the_way_from_pretraining_to_the_text_of_a_wav(finetune: ModuleType, tmp_path: Path) -> None:
    encoder, output = pretrain_and_export(tmp_path), tmp_path / "recogniser"
    command = [*map(str, (encoder, DEMO / "speech.json", DEMO / "speech_val.json")), "-o", str(output)]
    command += f"--steps {STEPS} --save-steps 3 --freeze-steps 3 --batch-seconds 30 --lr 0.02 --warmup-steps 1".split()
    results = finetune.main(command)

    lines = [json.loads(line) for line in (output / "test.jsonl").read_text().splitlines()]
    assert results == json.loads((output / "results.json").read_text())
    assert (results["num_train"], results["num_left_out"], results["num_test"]) == (40, 0, len(lines)) == (40, 0, 8)
    assert results["words"]["num_reference"] == sum(len(line["text"].split()) for line in lines)
    losses = [entry["loss"] for entry in state(output / "checkpoints" / f"checkpoint-{STEPS}") if "loss" in entry]
    assert losses[-1] < losses[0] - 1.0

    pretrained, frozen, tuned = weights(encoder), weights(output / "checkpoints" / "checkpoint-3"), weights(output)
    moved = {name for name, value in pretrained.items() if not torch.equal(value, frozen[f"encoder.{name}"])}
    assert {name.rpartition(".")[2] for name in moved} == {"running_mean", "running_var", "num_batches_tracked"}
    assert not torch.equal(pretrained["subsampling.linear.weight"], tuned["encoder.subsampling.linear.weight"])

    # The pipeline of transformers opens the directory, and gives the text that padded batches gave.
    transcribe = load("finetune_ctc/transcribe")
    paths = [DEMO / json.loads(line)["audio_filepath"] for line in (DEMO / "speech_val.json").open()]
    recognised = {line["id"]: line["recognised"] for line in lines}
    found = transcribe.main([str(output), *map(str, paths)])
    by_stem = {name.rpartition("/")[2]: text for name, text in recognised.items()}
    assert {path.stem: normalise_text(text) for path, text in zip(paths, found, strict=True)} == by_stem
    assert len(set(found)) > 1

    # A run that was interrupted after its first checkpoint ends with the same weights.
    shutil.rmtree(output / "checkpoints" / f"checkpoint-{STEPS}")
    with pytest.raises(SystemExit):
        finetune.main(command)
    finetune.main([*command, "--resume"])
    for name, value in weights(output).items():
        assert torch.equal(value, tuned[name]), name


def state(checkpoint: Path) -> list[dict[str, float]]:
    history: list[dict[str, float]] = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return history


def test_a_small_share_of_the_labels_is_part_of_a_larger_one(finetune: ModuleType, demo: Corpus) -> None:
    tenth, half, everything = (finetune.draw_labelled(demo, share, seed=3) for share in (0.1, 0.5, 1.0))
    assert (len(tenth), len(half), everything) == (4, 20, list(range(40)))
    assert set(tenth) < set(half)
    assert tenth != finetune.draw_labelled(demo, 0.1, seed=4)


@pytest.mark.parametrize("vocabulary", [1, 128])
def test_tokens_become_the_text_again_whether_characters_or_pairs(
    finetune: ModuleType, demo: Corpus, vocabulary: int
) -> None:
    texts = [finetune.transcript(demo, row) for row in range(len(demo))]
    tokenizer = finetune.train_tokenizer(texts, vocabulary)
    assert len(tokenizer) == (max(vocabulary, len(set("".join(texts))) + 2))
    for text in texts:
        tokens = tokenizer(text).input_ids
        frames = [label for token in tokens for label in (token, token, tokenizer.pad_token_id)]
        assert normalise_text(tokenizer.decode(frames, skip_special_tokens=True)) == text


def test_an_utterance_fits_if_there_is_a_frame_for_each_token_and_for_blanks_between_equal_ones(
    finetune: ModuleType, demo: Corpus
) -> None:
    tokenizer = finetune.train_tokenizer([finetune.transcript(demo, row) for row in range(len(demo))], 1)
    row = next(row for row in range(len(demo)) if "tt" in finetune.transcript(demo, row))
    text = finetune.transcript(demo, row)
    num_needed = len(text) + 1 + sum(first == second for first, second in pairwise(text))
    assert num_needed > len(text) + 1  # the space before the first word is a token
    samples_per_frame = demo.num_samples_of(row) // num_needed
    assert finetune.fits(demo, row, tokenizer, samples_per_frame)
    assert not finetune.fits(demo, row, tokenizer, demo.num_samples_of(row) // (num_needed - 1))


def test_from_scratch_keeps_the_architecture_and_draws_new_weights(finetune: ModuleType, tmp_path: Path) -> None:
    from transformers import ParakeetFeatureExtractor, ParakeetProcessor

    config = tiny_config()
    write_huggingface(tmp_path, config, NestNetwork(config).state_dict())
    extractor = ParakeetFeatureExtractor.from_pretrained(tmp_path)
    processor = ParakeetProcessor(extractor, finetune.train_tokenizer(["a b"], 1), decoder_type="ctc")
    trained, new = (finetune.build_model(tmp_path, processor, from_scratch=value) for value in (False, True))
    assert torch.equal(trained.encoder.subsampling.linear.weight, weights(tmp_path)["subsampling.linear.weight"])
    assert not torch.equal(trained.encoder.subsampling.linear.weight, new.encoder.subsampling.linear.weight)
    fan_in = new.encoder.subsampling.linear.in_features
    assert 0.9 < new.encoder.subsampling.linear.weight.abs().max() * fan_in**0.5 <= 1.0


@pytest.mark.parametrize(("flags", "message"), [("--resume", "no checkpoint to resume from: drop --resume")])
def test_a_resume_without_a_checkpoint_is_an_error(
    finetune: ModuleType, tmp_path: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        finetune.main(["encoder", "train.json", "test.json", "-o", str(tmp_path), flags])
    assert message in capsys.readouterr().err

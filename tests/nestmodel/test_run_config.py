"""Settings of a run: what files give, what is stored, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nestmodel import ConfigError, NestConfig, RunConfig, preset_names
from nestmodel.config_files import PARTIAL_PRESETS
from nestmodel.run_config import parse_duration, read_data

CHANGED = """
data:
  corpus: [a.corpus, b.corpus]
  noise: noise.corpus
  plan:
    max_batch_seconds: 100.0
    quadratic_seconds: 30.0
    num_shapes: 3
    weights: [0.6, 0.4]
    languages: [en, sw]
    stages: [{from_step: 5, weights: [1.0, 4.0]}]
  mix: {noise_snr_db: [0.0, 10.0], num_segments: [1, 2]}
  noise_sampler: {max_reads: 3, silence_db: -80.0}
  augment: {speech: [{Gain: {p: 1.0}}], speech_on: both, noise: [PolarityInversion]}
  start_method: spawn
  remote: {patience_s: 1.0, cache_dir: cache, cache_bytes: 5}
model:
  config:
    encoder:
      d_model: 32
      num_heads: 2
      num_layers: 3
      att_context_size: [[4, 1], [2, 1]]
      att_context_probs: [0.25, 0.75]
      att_context_style: chunked_limited
      conv_context_size: causal
    masking: {position: post_conv, block_size: 20}
    optimizer: {lr: 0.05, betas: [0.8, 0.9], schedule: wsd}
  init_from: other.ckpt
  init_parts: encoder
trainer:
  max_steps: 12
  max_time: 30m
  val_check_interval: 0.5
  deterministic: true
  strategy: {class_path: pytorch_lightning.strategies.DDPStrategy, init_args: {find_unused_parameters: false}}
  callbacks: [{class_path: pytorch_lightning.callbacks.EarlyStopping, init_args: {monitor: val_loss}}]
  lightning: {limit_val_batches: 3}
checkpoints: {every_n_steps: 5, directory: kept, monitor: val_loss}
guard:
  limits: {step_s: 1.0}
  enabled: false
seed: 9
log: [csv, wandb]
quiet: true
"""


def contains(whole: Any, part: Any) -> bool:
    """Returns whether every value of nested settings is in others."""
    if not isinstance(part, dict):
        return bool(whole == part)
    return all(contains(whole[name], value) for name, value in part.items())


def written(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    "names", [*([name] for name in preset_names()), *(["small", part] for part in PARTIAL_PRESETS)]
)
def test_a_preset_is_read_as_it_was_stored(names: list[str], tmp_path: Path) -> None:
    config = RunConfig.read(names)
    assert RunConfig.read([written(tmp_path / "config.yaml", config.stored())]) == config
    assert replace(config.model.config, seed=0) == NestConfig.preset(*names)


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "demo"])
def test_steps_of_all_sizes_hold_about_as_much_audio_and_are_clipped(name: str) -> None:
    config = RunConfig.read([name])
    assert 20_000 <= config.data.plan.max_batch_seconds * config.data.plan.microbatches_per_step <= 32_000
    assert config.data.plan.microbatches_per_step % 8 == 0  # the GPUs of a node
    assert config.trainer.gradient_clip_val == 1.0


def test_preset_v2_mixes_quieter_speech_over_other_lengths() -> None:
    mix, of_size = (RunConfig.read(names).data.mix for names in (["small", "v2"], ["small"]))
    assert mix == replace(of_size, speech_snr_db=(10.0, 20.0), mix_rate=(0.3, 0.6))


def test_a_run_with_settings_of_every_kind_is_read_as_it_was_stored(tmp_path: Path) -> None:
    config = RunConfig.read([written(tmp_path / "changed.yaml", CHANGED)])
    assert RunConfig.read([written(tmp_path / "config.yaml", config.stored())]) == config
    given = yaml.safe_load(CHANGED)
    assert contains(config.stored(), {**given, "data": {}, "model": {}})
    assert (config.data.plan.weights, config.model.config.encoder.d_model) == ((0.6, 0.4), 32)


def test_later_files_replace_single_values_of_earlier_ones(tmp_path: Path) -> None:
    later = written(tmp_path / "later.yaml", "{data: {plan: {max_batch_seconds: 1}, corpus: a}, seed: 3}")
    demo, config = RunConfig.read(["demo"]), RunConfig.read(["demo", later])
    assert config.data.corpora == (Path("a"),)
    assert config.data.plan == replace(demo.data.plan, max_batch_seconds=1.0, seed=3)
    assert replace(config, data=demo.data, seed=0) == demo


def test_the_seed_is_that_of_plan_and_model(tmp_path: Path) -> None:
    config = replace(RunConfig.read(["demo"]), seed=5)
    assert (config.data.plan.seed, config.model.config.seed) == (5, 5)
    later = written(tmp_path / "later.yaml", "seed: 6")
    assert RunConfig.read(["demo", later]).data.plan.seed == 6
    data, seed = read_data([later])
    assert (data.plan.seed, seed) == (6, 6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{trainer: {max_step: 3}}", "trainer.max_step is unknown; the nearest is 'max_steps'"),
        (
            "{model: {config: {encoder: {d_modl: 8}}}}",
            "model.config.encoder.d_modl is unknown; the nearest is 'd_model'",
        ),
        ("{trainer: {max_steps: ten}}", "trainer.max_steps is 'ten': expected int"),
        ("{trainer: {max_steps: 0}}", "trainer.max_steps is 0"),
        *(
            (f"{{trainer: {{val_check_interval: {value}}}}}", f"trainer.val_check_interval is {value}")
            for value in (0, -1, 2.0, -0.5)
        ),
        ("{trainer: 3}", "trainer is 3"),
        ("{trainer: {lightning: {max_steps: 3}}}", "max_steps"),
        ("{model: {config: {optimizer: {lr: 1e-3}}}}", "such as 1.0e-5"),
        ("- data", "expected sections"),
        ("data: [}", "later.yaml: not YAML"),
        ("seed: 1\ntrainer: {max_steps: 2}\nseed: 2\n", "'seed' is there twice"),
        ("data: {plan: {seed: 1, max_cuts: 4, seed: 2}}", "'seed' is there twice"),
    ],
)
def test_a_mistake_in_a_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    later = written(tmp_path / "later.yaml", content)
    with pytest.raises(ConfigError) as caught:
        RunConfig.read(["demo", later])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "no configuration"), (["demoo"], "the nearest is 'demo'"), (["streaming"], "streaming is not a whole model")],
)
def test_what_is_no_whole_configuration_is_named(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.read(names)


def test_resume_and_a_checkpoint_exclude_each_other() -> None:
    demo = RunConfig.read(["demo"])
    assert replace(demo, resume=True, ckpt_path="last").resume
    with pytest.raises(ConfigError, match="--resume and --ckpt-path"):
        replace(demo, resume=True, ckpt_path="other.ckpt")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("1.5h", 5400), ("1d", 86400), ("11:30:00", 41400), ("01:02:03:04", 93784)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration("trainer.max_time", text) == seconds


@pytest.mark.parametrize("text", ["30", "0s", "1:30", "-3m"])
def test_a_duration_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_time is .*: give it with its unit"):
        parse_duration("trainer.max_time", text)


def test_an_error_names_the_file_and_where_a_misplaced_section_belongs(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("optimizer: {lr: 1.0}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: optimizer is unknown; here it is model\.config\.optimizer"):
        RunConfig.read(["demo", path])
    with pytest.raises(ConfigError, match=r"other\.yml: does not exist"):
        RunConfig.read([tmp_path / "other.yml"])
    with pytest.raises(ConfigError, match="is a folder, not a configuration"):
        RunConfig.read([tmp_path])


def test_a_preset_is_found_beside_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = RunConfig.read(["demo"])
    (tmp_path / "demo").mkdir()  # as `make demo` does
    assert RunConfig.read(["demo"]) == expected

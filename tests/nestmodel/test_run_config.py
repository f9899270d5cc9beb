"""Settings of a run: what files give, what is stored, and what is refused."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nestmodel import ConfigError, NestConfig, RunConfig, preset_names
from nestmodel.config import LIVE_PRESETS
from nestmodel.run_config import ModelConfig, parse_duration, read_data

CHANGED = """
data:
  corpus: [a.corpus, b.corpus]
  noise: noise.corpus
  val_corpus: val.corpus
  plan:
    max_batch_seconds: 100.0
    microbatches_per_step: 4
    min_audio_seconds: 0.5
    quadratic_seconds: 30.0
    max_cuts: 6
    bucket_width: 0.02
    num_shapes: 3
    weights: [0.6, 0.4]
    temperature: 2.0
    languages: [en, sw]
    language_temperature: 3.0
    stages: [{from_step: 5, weights: [1.0, 4.0]}]
  mix:
    prob: 0.9
    noise_ratio: 0.7
    noise_snr_db: [0.0, 10.0]
    speech_snr_db: [-1.0, 1.0]
    mix_rate: [0.2, 0.6]
    num_segments: [1, 2]
    num_speakers: [1, 2]
  noise_sampler: {max_reads: 3, max_crops: 4, silence_db: -60.0, white_db: [-80.0, -40.0]}
  short_audio: pad
  augment: {speech: [{Gain: {p: 1.0}}], speech_on: both, noise: [PolarityInversion], mixture: [PolarityInversion]}
  bad_audio: {max_share: 0.5, max_noise_share: 0.25, min_count: 5}
  num_workers: 1
  start_method: spawn
  remote: {patience_s: 1.0, max_requests: 2, ahead_bytes: 300000000, cache_dir: cache, cache_bytes: 5}
model:
  config:
    encoder:
      d_model: 32
      num_heads: 2
      num_layers: 3
      subsampling_channels: 16
      subsampling_factor: 4
      ff_expansion: 2
      conv_kernel_size: 7
      dropout: 0.2
      dropout_pre_encoder: 0.2
      dropout_att: 0.2
      dropout_emb: 0.2
      xscaling: false
      use_bias: false
      conv_norm: layer_norm
      att_context_size: [[4, 1], [2, 1]]
      att_context_probs: [0.25, 0.75]
      att_context_style: chunked_limited
      conv_context_size: causal
      causal_downsampling: true
      checkpoint_activations: true
    features:
      sampling_rate: 8000
      n_fft: 256
      window_length: 200
      hop_length: 80
      num_mels: 40
      dither: 0.0
      pad_to: 8
      preemphasis: 0.9
      normalize: NA
    quantizer: {num_classes: 64, num_codebooks: 2, code_dim: 8, distance: cosine, normalize: as_features}
    masking: {position: post_conv, block_size: 20, prob: 0.05, threshold: 0.5, target_shift: 1}
    optimizer:
      lr: 0.05
      betas: [0.8, 0.9]
      weight_decay: 0.1
      warmup_steps: 7
      min_lr: 0.0
      max_skipped_steps: 3
      schedule: wsd
      decay_share: 0.5
  init_from: other.ckpt
  init_parts: encoder
  kernels: torch
trainer:
  max_steps: 12
  max_time: 30m
  early_stop: 3
  val_check_interval: 0.5
  log_every_n_steps: 3
  gradient_clip_val: 1.0
  precision: bf16-mixed
  deterministic: true
  accelerator: cpu
  devices: 2
  num_nodes: 2
  strategy: {class_path: pytorch_lightning.strategies.DDPStrategy, init_args: {find_unused_parameters: false}}
  callbacks: [{class_path: pytorch_lightning.callbacks.EarlyStopping, init_args: {monitor: val_loss}}]
  lightning: {limit_val_batches: 3}
checkpoints: {every_n_steps: 5, keep: 3, keep_every_n_steps: 10, directory: kept, monitor: val_loss}
guard:
  limits:
    step_s: 1.0
    first_step_s: 2.0
    validation_s: 3.0
    checkpoint_s: 4.0
    finishing_s: 5.0
    node_silence_s: 6.0
  report_dir: reports
  port: 1234
  enabled: false
seed: 9
output: out
log: [csv, wandb]
quiet: true
"""


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the fields of nested dataclasses."""
    for part in fields(value):
        inner, name = getattr(value, part.name), f"{where}.{part.name}".removeprefix(".")
        if is_dataclass(inner):
            yield from leaves(inner, name)
        else:
            yield name, inner


def written(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("names", [*([name] for name in preset_names()), *(["small", live] for live in LIVE_PRESETS)])
def test_a_preset_is_read_as_it_was_stored(names: list[str], tmp_path: Path) -> None:
    config = RunConfig.read(names)
    assert RunConfig.read([written(tmp_path / "config.yaml", config.stored())]) == config
    assert replace(config.model.config, seed=0) == NestConfig.preset(*names)


def test_a_run_with_every_setting_changed_is_read_as_it_was_stored(tmp_path: Path) -> None:
    config = RunConfig.read([written(tmp_path / "changed.yaml", CHANGED)])
    stored = config.stored()
    assert RunConfig.read([written(tmp_path / "config.yaml", stored)]) == config
    given = yaml.safe_load(CHANGED)
    assert {**stored, "data": None, "model": None} == {**given, "data": None, "model": None}
    default = RunConfig(model=ModelConfig(config=NestConfig.preset("small")))
    changed = dict(leaves(config))
    same = {name for name, value in leaves(default) if changed.get(name, "a dataclass") == value}
    # A checkpoint to resume is not stored; tokens after the subsampling have one normalisation.
    assert same == {"ckpt_path", "resume", "model.config.quantizer.normalize"}


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
        ("{trainer: 3}", "trainer is 3"),
        ("{trainer: {lightning: {max_steps: 3}}}", "max_steps"),
        ("{model: {config: {optimizer: {lr: 1e-3}}}}", "such as 1.0e-5"),
        ("- data", "expected sections"),
        ("data: [}", "later.yaml: not YAML"),
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

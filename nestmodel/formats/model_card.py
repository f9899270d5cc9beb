"""Model cards: what is known about an exported model, as Markdown with a YAML header for the Hugging Face hub.

Values that the source of an export does not hold are "unknown" in its card. The publisher fills in the licence.
All text of checkpoints is escaped, so that it cannot become markup, a link or a field of the header.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from nestdata import redacted
from nestmodel.class_config import ClassConfig
from nestmodel.config import ExportFormat, NestConfig, WeightParts
from nestmodel.formats.onnx import samples_in_front
from nestmodel.formats.safetensors import RECORD_KEY, SETTINGS_KEY

UNKNOWN = "unknown"
_DISTRIBUTION = "nest-pretrain"
_HEADER = """---
# Fill in, for example apache-2.0:
# license:
tags: [speech, self-supervised, nest{tag}]
{library}pipeline_tag: feature-extraction
---"""
_PARTS: Mapping[str, str] = {"all": "encoder, decoder and quantizer", "encoder": "encoder"}
_TRANSFORMERS = """import soundfile
from transformers import AutoFeatureExtractor, AutoModel

model = "."  # the folder of this file, or OWNER/NAME on the Hugging Face hub
encoder, extractor = AutoModel.from_pretrained(model), AutoFeatureExtractor.from_pretrained(model)
audio, rate = soundfile.read("talk.wav")  # one channel, at the rate below
frames = encoder(**extractor(audio, sampling_rate=rate, return_tensors="pt")).last_hidden_state"""
_CTC = """from transformers import AutoConfig, ParakeetCTCConfig, ParakeetForCTC

config = ParakeetCTCConfig(encoder_config=AutoConfig.from_pretrained(model), vocab_size=1024, pad_token_id=0)
recogniser = ParakeetForCTC.from_pretrained(model, config=config)"""
_NESTMODEL = """from nestmodel import encode

frames = encode("{path}", "talk.wav").values  # (frames, dim)"""
_SESSION = """import numpy as np
import onnxruntime
import soundfile

session = onnxruntime.InferenceSession("{path}")
audio, rate = soundfile.read("talk.wav", dtype="float32")  # one channel, at the rate below
"""
_ONNX = """inputs = {"audio": audio[None], "audio_lens": np.array([len(audio)])}
frames, num_frames = session.run(None, inputs)  # (1, frames, dim), (1,); the rows of a batch are padded"""
_ONNX_STREAMING = """chunk, _, *others = session.get_inputs()
caches = {{cache.name: np.zeros([1 if n == "batch" else n for n in cache.shape], np.float32) for cache in others}}
caches["cache_len"] = np.zeros(1, np.int64)
size, step = chunk.shape[1], {step}  # samples that a chunk reads, which overlap, and samples of a chunk
stream = np.pad(audio, ({in_front}, size))  # a chunk reads {in_front} samples before its own
frames = []
for start in range(0, len(audio) + 1, step):
    # How many samples are left from here; while the end is not known, size.
    inputs = {{"audio": stream[None, start : start + size], "audio_lens": np.array([len(audio) - start])}}
    encoded, num_frames, *new = session.run(None, {{**inputs, **caches}})
    caches = dict(zip(caches, new))
    frames.append(encoded[0, : num_frames[0]])
frames = np.concatenate(frames)  # (frames, dim)"""
_PLAIN_NAME = re.compile(r"[\w .-]+", re.ASCII)
_MAX_CHARACTERS = 200
_MAX_ROWS = 100
_MARKUP = re.compile(r"([\\`*_{}\[\]()#!|~:@$^=])|(?<=www)(\.)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a file records about the training of its weights; empty unless the file is a checkpoint of a run."""

    facts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: Callable[[str], Any]) -> "Training":
        """Reads the record from a checkpoint, whose values may have any type, because files are not trusted."""
        facts, settings = _texts(entry(RECORD_KEY)), _texts(entry(SETTINGS_KEY))
        return cls(facts={"optimizer steps": str(entry("global_step")), **facts} if settings else {}, settings=settings)


def model_card(
    title: str,
    config: NestConfig,
    training: Training,
    *,
    to: ExportFormat,
    parts: WeightParts,
    source: str | None,
) -> str:
    """Returns the card of an exported model.

    Args:
        title: Name of the model.
        config: Its configuration.
        training: What is known about its training.
        to: The format of the export.
        parts: The exported parts.
        source: Where the weights are from; None if unknown.
    """
    encoder, features = config.encoder, config.features
    facts = {
        "parts": _PARTS[parts],
        "encoder": encoder.class_path
        if isinstance(encoder, ClassConfig)
        else f"FastConformer, {encoder.num_layers} layers of dim {encoder.d_model}",
        "input": f"audio at {features.sampling_rate} Hz",
        **({} if isinstance(encoder, ClassConfig) else {"frames": f"one every {1000 * config.frame_s:g} ms"}),
        "exported from": UNKNOWN if source is None else source,
        "exported by": f"{_DISTRIBUTION} {version(_DISTRIBUTION)}",
    }
    settings = {k: v for k, v in training.settings.items() if not k.startswith("model.config") and v != "None"}
    sections = [
        _HEADER.format(
            library="library_name: transformers\n" if to == "huggingface" else "",
            tag="" if isinstance(encoder, ClassConfig) else ", fastconformer",
        ),
        f"# {escaped(title)}",
        "A speech encoder, pretrained on unlabelled speech with NEST "
        "([arXiv:2408.13106](https://arxiv.org/abs/2408.13106)).",
        _table(("", ""), facts),
        _use(title, config, to, parts),
        _recognition(config) if to == "huggingface" else "",
        "## Licence\n\nThe publisher of the model fills this in, here and in the header of this file.",
        "## Training",
        _table(("", ""), training.facts) if training.facts else f"Data, steps and metrics: {UNKNOWN}.",
        "A loss below the entropy of the tokens shows that something was learned." if training.facts else "",
        "## Settings",
        _table(("setting", "value"), settings) if settings else f"Of the run: {UNKNOWN}.",
        f"Of the model:\n\n```json\n{json.dumps(asdict(config), indent=2)}\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def escaped(text: str) -> str:
    """Returns a text as Markdown that shows it, in one line without markup or links; long texts are shortened."""
    text = " ".join("".join(c if c.isprintable() else " " for c in redacted(text)).split())
    text = text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."
    text = _MARKUP.sub(lambda match: "\\" + match[0], text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _use(name: str, config: NestConfig, to: ExportFormat, parts: WeightParts) -> str:
    """Returns lines of Python that apply the model; empty for the encoder as safetensors."""
    path = name if _PLAIN_NAME.fullmatch(name) else f"model.{to}"
    if to == "huggingface":
        code = _TRANSFORMERS
    elif to == "onnx":
        code = _SESSION.format(path=path) + _ONNX
    elif to == "onnx-streaming":
        encoder, features = config.conformer, config.features
        step = (encoder.att_context_size[0][1] + 1) * encoder.subsampling_factor * features.hop_length
        code = _SESSION.format(path=path) + _ONNX_STREAMING.format(step=step, in_front=samples_in_front(features))
    elif parts == "all":
        code = _NESTMODEL.format(path=path)
    else:
        return ""
    return f"## Use\n\n```python\n{code}\n```"


def _recognition(config: NestConfig) -> str:
    """Returns how to make a model for speech recognition from the encoder, or why transformers cannot."""
    if config.conformer.causal_downsampling:
        return (
            "## Speech recognition\n\ntransformers has no CTC model with an encoder for live speech, and "
            "`ParakeetForCTC.from_pretrained` of this folder raises an error. `examples/finetune_ctc` of "
            f"{_DISTRIBUTION} makes such a model from the checkpoint of this encoder."
        )
    return (
        "## Speech recognition\n\nThese lines make a CTC model with this encoder and a new head, which transformers "
        "reports as MISSING. It has to be trained with a tokenizer of that vocabulary, whose blank is the token for "
        f"padding. Without `config`, `from_pretrained` expects an encoder of 24 x 1024.\n\n```python\n{_CTC}\n```"
    )


def _texts(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, Mapping) else {}


def _table(names: tuple[str, str], rows: Mapping[str, str]) -> str:
    lines = [*names], ["---", "---"], *([escaped(name), escaped(text)] for name, text in list(rows.items())[:_MAX_ROWS])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

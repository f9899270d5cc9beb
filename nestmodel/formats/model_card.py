"""Model cards: what is known about an exported model, as Markdown with a YAML header for the Hugging Face hub.

Values that the source of an export does not hold are "unknown" in its card. The publisher fills in the licence.
All text of checkpoints is escaped, so that it cannot become markup, a link or a field of the header.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version

import yaml

from nestdata import redacted
from nestmodel.config import NestConfig
from nestmodel.formats.training_record import CorpusRecord, TrainingRecord
from nestmodel.options import ExportFormat, WeightParts

UNKNOWN = "unknown"
_DISTRIBUTION = "nest-pretrain"
_LIBRARIES: Mapping[str, str] = {
    "huggingface": "transformers",
    "nemo": "nemo",
    "onnx": "onnx",
    "onnx-streaming": "onnx",
}
_PARTS: Mapping[str, str] = {"all": "encoder, decoder and quantizer", "encoder": "encoder"}
_TRANSFORMERS = """import soundfile
from transformers import AutoFeatureExtractor, AutoModel

model = "."  # the folder of this file, or OWNER/NAME on the Hugging Face hub
encoder, extractor = AutoModel.from_pretrained(model), AutoFeatureExtractor.from_pretrained(model)
audio, rate = soundfile.read("talk.wav")  # one channel, at the rate below
frames = encoder(**extractor(audio, sampling_rate=rate, return_tensors="pt")).last_hidden_state"""
_NESTMODEL = """from nestmodel import encode

frames = encode("{path}", "talk.wav").values  # (frames, dim)"""
_PLAIN_NAME = re.compile(r"[\w .-]+", re.ASCII)
_MAX_CHARACTERS = 200
_MAX_ROWS = 100
_MARKUP = re.compile(r"([\\`*_{}\[\]()#!|~:@$^=])|(?<=www)(\.)", re.IGNORECASE)


def model_card(
    title: str,
    config: NestConfig,
    record: TrainingRecord | None,
    *,
    to: ExportFormat,
    parts: WeightParts,
    source: str | None,
) -> str:
    """Returns the card of an exported model.

    Args:
        title: Name of the model.
        config: Its configuration.
        record: What is known about its training; None if nothing is.
        to: The format of the export.
        parts: The exported parts.
        source: Where the weights are from; None if unknown.
    """
    known = record or TrainingRecord()
    encoder, features = config.encoder, config.features
    facts = {
        "parts": _PARTS[parts],
        "encoder": f"FastConformer, {encoder.num_layers} layers of dim {encoder.d_model}",
        "input": f"audio at {features.sampling_rate} Hz",
        "frames": f"one every {1000 * config.frame_s:g} ms",
        "exported from": UNKNOWN if source is None else source,
        "exported by": f"{_DISTRIBUTION} {version(_DISTRIBUTION)}",
    }
    run = {
        "optimizer steps": UNKNOWN if known.steps is None else f"{known.steps:,}",
        "hours of speech": _hours(known.corpora),
        **({} if known.started_from is None else {"started with the weights of": known.started_from}),
        "trained by": UNKNOWN if known.version is None else f"{_DISTRIBUTION} {known.version}",
    }
    settings = {k: v for k, v in known.settings.items() if not k.startswith("model.config") and v != "None"}
    sections = [
        _header(to),
        f"# {escaped(title)}",
        "A speech encoder, pretrained on unlabelled speech with NEST "
        "([arXiv:2408.13106](https://arxiv.org/abs/2408.13106)).",
        _table(("", ""), facts.items()),
        _use(title, to, parts),
        "## Licence\n\nThe publisher of the model fills this in, here and in the header of this file.",
        "## Training data",
        _corpora("Speech", known.corpora),
        _corpora("Noise", known.noise),
        "## Training",
        _table(("", ""), run.items()),
        _metrics(known),
        "## Settings",
        _table(("setting", "value"), list(settings.items())[:_MAX_ROWS]) if settings else f"Of the run: {UNKNOWN}.",
        f"Of the model:\n\n```json\n{json.dumps(asdict(config), indent=2)}\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def escaped(text: str) -> str:
    """Returns a text as Markdown that shows it, in one line without markup or links; long texts are shortened."""
    text = " ".join("".join(c if c.isprintable() else " " for c in redacted(text)).split())
    text = text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."
    text = _MARKUP.sub(lambda match: "\\" + match[0], text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _header(to: ExportFormat) -> str:
    fields: dict[str, object] = {"tags": ["speech", "self-supervised", "nest", "fastconformer"]}
    fields |= {"library_name": _LIBRARIES[to]} if to in _LIBRARIES else {}
    fields["pipeline_tag"] = "feature-extraction"
    return f"---\n# Fill in, for example apache-2.0:\n# license:\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _use(name: str, to: ExportFormat, parts: WeightParts) -> str:
    """Returns lines of Python that load the model; empty for a format without a loader of one line."""
    if to == "huggingface":
        code = _TRANSFORMERS
    elif parts == "all":
        code = _NESTMODEL.format(path=name if _PLAIN_NAME.fullmatch(name) else f"model.{to}")
    else:
        return ""
    return f"## Use\n\n```python\n{code}\n```"


def _corpora(title: str, corpora: Sequence[CorpusRecord]) -> str:
    if not corpora:
        return f"{title}: {UNKNOWN}."
    rows = (
        (corpus.name, f"{corpus.hours:.2f}", f"{corpus.num_cuts:,}", corpus.fingerprint)
        for corpus in corpora[:_MAX_ROWS]
    )
    return f"{title}:\n\n{_table(('corpus', 'hours', 'cuts', 'fingerprint'), rows)}"


def _hours(corpora: Sequence[CorpusRecord]) -> str:
    return f"{sum(corpus.hours for corpus in corpora):.2f}" if corpora else UNKNOWN


def _metrics(record: TrainingRecord) -> str:
    """Returns a table of the last validation and the last step, without what is unknown."""
    validated = "validation" if record.val_step is None else f"validation after step {record.val_step:,}"
    rows = [
        (name, _metric(metrics, "loss"), _metric(metrics, "token_entropy"), _metric(metrics, "accuracy"))
        for name, metrics in ((validated, record.val_metrics), ("last training step", record.train_metrics))
        if metrics
    ]
    if not rows:
        return f"Loss and accuracy: {UNKNOWN}."
    names = ("", "loss, nats", "entropy of the tokens, nats", "masked accuracy")
    below = "A loss below the entropy of the tokens shows that something was learned."
    return f"{_table(names, rows)}\n\n{below}"


def _metric(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else UNKNOWN


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines: list[Sequence[str]] = [names, ["---"] * len(names)]
    lines += [[escaped(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

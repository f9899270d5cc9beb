"""A recogniser for live speech: an encoder that can be streamed, and a linear layer trained with the loss of CTC.

transformers has no CTC model with such an encoder, so this is the network of nestmodel. Its classes are called as those
of transformers are, so that `finetune.py` and `score.py` use either. `Transcriber` writes text while audio arrives.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from nestmodel import ConfigError, NestNetwork, StreamingEncoder, load_network, save_network

BLANK, UNKNOWN = "<pad>", "<unk>"
"""transformers uses the padding token as the blank of CTC."""

NETWORK_FILE = "network.ckpt"
HEAD_FILE = "ctc_head.safetensors"


def check_recogniser(directory: Path) -> None:
    """Ends the program unless a directory holds a recogniser."""
    if not any((directory / name).is_file() for name in (NETWORK_FILE, "tokenizer.json")):
        raise SystemExit(f"error: {directory}: holds no recogniser. Give the directory that finetune.py wrote.")


class LiveFeatures:
    """Computes the features of a network, which are those of a stream; called as transformers' extractors are."""

    def __init__(self, network: NestNetwork) -> None:
        self.features = deepcopy(network.features).eval()  # stays on the CPU, and draws no dither
        self.sampling_rate = network.config.features.sampling_rate
        self.hop_length = network.config.features.hop_length

    def __call__(self, audio: Sequence[NDArray[np.float32]], **_: Any) -> dict[str, Tensor]:
        """Returns log-mel features, shape (batch, frames, mels), and a mask that is True for their valid frames."""
        padded = nn.utils.rnn.pad_sequence([torch.from_numpy(samples) for samples in audio], batch_first=True)
        feats, feat_lens = self.features(padded, torch.tensor([len(samples) for samples in audio]))
        is_valid = torch.arange(feats.shape[2]) < feat_lens[:, None]
        return {"input_features": feats.transpose(1, 2), "attention_mask": is_valid}


class LiveRecogniser(nn.Module):
    """A network with a new CTC head, for all attention contexts of its encoder.

    In training, each batch takes one of them, drawn from torch's generator with the probabilities of pretraining. In
    eval mode, `use_context` selects one.

    Raises:
        ConfigError: The encoder cannot be streamed.
    """

    def __init__(self, network: NestNetwork, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.context = StreamingEncoder(network).context
        self.network = network
        self.ctc_head = nn.Linear(network.config.encoder.d_model, tokenizer.get_vocab_size())
        self.blank = tokenizer.token_to_id(BLANK)
        names = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
        self.texts = ["" if name in (BLANK, UNKNOWN) else name.replace("▁", " ") for name in names]
        """Text of each token; the tokeniser marks spaces by U+2581."""

    @classmethod
    def from_pretrained(cls, directory: Path) -> "LiveRecogniser":
        """Loads what `save_pretrained` and the tokeniser wrote, on the CPU and in eval mode.

        Raises:
            ConfigError: The directory is no recogniser for live speech.
            WeightsError: The network cannot be read.
        """
        if not (directory / NETWORK_FILE).is_file():
            raise ConfigError(
                f"{directory} is no recogniser for live speech (no {NETWORK_FILE}). Give what `finetune.py` writes if "
                "ENCODER is a checkpoint of an encoder for live speech."
            )
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        model = cls(load_network(directory / NETWORK_FILE), tokenizer)
        model.ctc_head.load_state_dict(load_file(directory / HEAD_FILE))
        return model.eval()

    def save_pretrained(self, directory: Path) -> None:
        """Writes the network, which every command of nestmodel reads, and the head."""
        save_network(self.network, directory / NETWORK_FILE, overwrite=True)
        save_file(self.ctc_head.state_dict(), directory / HEAD_FILE)

    @property
    def encoder(self) -> nn.Module:
        """The part that is frozen in the first steps."""
        return self.network.encoder

    @property
    def device(self) -> torch.device:
        """The device of all weights."""
        return self.ctc_head.weight.device

    @property
    def contexts(self) -> tuple[tuple[int, int], ...]:
        """The attention contexts, (left, right) in encoder frames."""
        return self.network.config.encoder.att_context_size

    def use_context(self, context: tuple[int, int]) -> None:
        """Recognises in one of the contexts from now on; another one raises ConfigError."""
        (self.context,) = self.network.config.encoder.with_context(context).att_context_size

    def forward(self, input_features: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the loss: the mean over the tokens of an utterance, then over utterances, as in ParakeetForCTC.

        Args:
            input_features: Of `LiveFeatures`, as is `attention_mask`.
            attention_mask: True for valid frames.
            labels: Tokens, shape (batch, tokens), padded by the blank.
        """
        # A resumed Trainer restores the generator, for dropout as well.
        drawn = self.network.encoder.draw_context(int(torch.randint(2**63 - 1, ()))) if self.training else None
        logits, lens = self._logits(input_features, attention_mask, drawn or self.context)
        log_probs = logits.log_softmax(2).transpose(0, 1)
        num_labels = (labels != self.blank).sum(1)
        return {"loss": F.ctc_loss(log_probs, labels, lens, num_labels, self.blank, zero_infinity=True)}

    @torch.no_grad()
    def generate(self, input_features: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns the most likely token of each frame, shape (batch, enc_frames); the blank in padding."""
        logits, lens = self._logits(input_features, attention_mask, self.context)
        is_padding = torch.arange(logits.shape[1], device=lens.device) >= lens[:, None]
        return logits.argmax(2).masked_fill(is_padding, self.blank)

    def _logits(self, feats: Tensor, is_valid: Tensor, context: tuple[int, int]) -> tuple[Tensor, Tensor]:
        frames, lens = self.network.encoder(feats.transpose(1, 2), is_valid.sum(1), context=context)
        return self.ctc_head(frames), lens


class Transcriber:
    """Writes the text of one stream of audio while it arrives, with the most likely token of each frame.

    The texts of all parts together are that of the whole audio, however it is split.

    Args:
        model: The recogniser, in eval mode.
        context: One of its attention contexts; by default the first of them that can be streamed.

    Raises:
        ConfigError: It has no such context, or the context cannot be streamed.
    """

    def __init__(self, model: LiveRecogniser, context: tuple[int, int] | None = None) -> None:
        self.stream = StreamingEncoder(model.network, context)
        self.text = ""
        self._model, self._last = model, model.blank

    def feed(self, samples: NDArray[np.float32], sampling_rate: int) -> str:
        """Takes the next samples, as `StreamingEncoder.feed` does, and returns the text that they add; often none."""
        return self._write(self.stream.feed(samples, sampling_rate))

    def close(self) -> str:
        """Ends the stream, and returns the last text."""
        return self._write(self.stream.close())

    @torch.inference_mode()
    def _write(self, frames: Tensor) -> str:
        # A token that goes on is written once, also if it began in an earlier part.
        tokens = [self._last, *self._model.ctc_head(frames).argmax(1).tolist()]
        self._last = tokens[-1]
        new = "".join(self._model.texts[token] for before, token in pairwise(tokens) if token != before)
        new = new if self.text else new.lstrip()
        self.text += new
        return new

"""The encoder as an ONNX graph, for any batch size and any number of frames.

Owns the graph's inputs and outputs. Guarantees the encoder's frames in eval mode, whatever size was traced: nothing of
the example that is traced stays in the graph.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError
from nestmodel.nn.encoder import ConformerEncoder

OPSET = 18
INPUTS = ("feats", "feat_lens")
OUTPUTS = ("encoded", "enc_lens")


class _TracedEncoder(nn.Module):
    """The encoder without what depends on the size of a batch.

    It encodes one encoder frame more than there is, and cuts it off: attention branches on whether there is a single
    one, which a graph cannot. In eval mode no valid frame sees it. The subsampling, which `ConvSubsampling` may do for
    some utterances at a time, is done for all at once.
    """

    def __init__(self, encoder: ConformerEncoder, factor: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.factor = factor

    def forward(self, feats: Tensor, feat_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Takes (batch, mels, frames) and (batch,), gives (batch, enc_frames, dim) and (batch,)."""
        lens = feat_lens
        x = F.pad(feats, (0, self.factor)).transpose(1, 2).unsqueeze(1)  # (batch, channels, frames, mels)
        x = x * _is_valid(x, lens)
        for layer in self.encoder.pre_encode.conv:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                lens = (lens + 1) // 2
                x = x * _is_valid(x, lens)
        x = self.encoder.pre_encode.out(x.transpose(1, 2).flatten(2))
        return self.encoder.encode(x, lens)[:, :-1], lens


def _is_valid(x: Tensor, lens: Tensor) -> Tensor:
    positions = torch.arange(x.shape[2], device=x.device)
    return (positions < lens.unsqueeze(1))[:, None, :, None].to(x.dtype)


def write_onnx(path: Path, config: NestConfig, encoder: ConformerEncoder) -> None:
    """Writes the encoder as a graph from features to encoder frames.

    Inputs are `feats`, float32 (batch, mels, frames), and `feat_lens`, int64 (batch,); outputs `encoded`, float32
    (batch, enc_frames, dim), of which padded frames mean nothing, and `enc_lens`, int64 (batch,). The configuration
    lies in the graph's metadata as JSON. Weights of more than 2 GB go to `<name>.data` beside the file.

    Args:
        path: The file to write.
        config: That of the model.
        encoder: On the CPU; left in eval mode.

    Raises:
        ConfigError: The `export` extra is not installed.
        OSError: It cannot be written.
    """
    try:
        import onnx  # noqa: F401 - torch imports it late, and says less about it
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ONNX needs {error.name}. Install it: pip install 'nest-pretrain[export]'.") from error
    encoder.eval()
    example = torch.zeros(2, config.features.num_mels, 96), torch.tensor([96, 80])
    with _quietly(), torch.no_grad():
        program = torch.onnx.export(
            _TracedEncoder(encoder, config.encoder.subsampling_factor).eval(),
            example,
            dynamo=True,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes={"feats": {0: "batch", 2: "frames"}, "feat_lens": {0: "batch"}},
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props["nest_config"] = json.dumps(asdict(config))
    program.save(path)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps the exporter from remarks about other packages, and about types of its own that are going away."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

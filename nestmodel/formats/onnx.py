"""Export of the encoder as an ONNX graph, for any batch size and any number of frames.

The graph computes the encoder frames of eval mode. Nothing in it depends on the size of the traced example.
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
    """The encoder without branches on the size of a batch, which a graph cannot hold.

    Attention branches on whether there is a single encoder frame, so one padded frame is appended and removed at the
    end; in eval mode it does not affect valid frames. The subsampling processes the whole batch at once, while
    `ConvSubsampling.forward` splits large batches.
    """

    def __init__(self, encoder: ConformerEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, feats: Tensor, feat_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes (batch, mels, frames) and (batch,) as (batch, enc_frames, dim) and (batch,)."""
        subsampling = self.encoder.pre_encode
        padded = F.pad(feats, (0, subsampling.factor))
        enc_lens = subsampling.out_lens(feat_lens)
        subsampled = subsampling.out(subsampling.convolve(padded, feat_lens))
        return self.encoder.encode(subsampled, enc_lens)[:, :-1], enc_lens


def write_onnx(path: Path, config: NestConfig, encoder: ConformerEncoder) -> None:
    """Writes the encoder as a graph from features to encoder frames.

    The inputs are `feats`, float32 (batch, mels, frames), and `feat_lens`, int64 (batch,). The outputs are `encoded`,
    float32 (batch, enc_frames, dim), whose padded frames are meaningless, and `enc_lens`, int64 (batch,). The
    configuration is stored as JSON in the metadata of the graph. More than 2 GB of weights are written to `<name>.data`
    beside the file.

    Args:
        path: The file to write.
        config: Configuration of the model.
        encoder: An encoder on the CPU. It is switched to eval mode.

    Raises:
        ConfigError: The `export` extra is not installed.
        OSError: The file cannot be written.
    """
    try:
        import onnx  # noqa: F401 - torch imports it late, with a less helpful error
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ONNX needs {error.name}. Install it: pip install 'nest-pretrain[export]'.") from error
    encoder.eval()
    example = torch.zeros(2, config.features.num_mels, 96), torch.tensor([96, 80])
    with _without_warnings(), torch.no_grad():
        program = torch.onnx.export(
            _TracedEncoder(encoder).eval(),
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
def _without_warnings() -> Iterator[None]:
    """Suppresses the exporter's warnings about other packages and about its own deprecated types."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

"""Closed choices that the Python functions and the commands share.

This module imports neither torch nor numpy, so that a command can show its help without them.
"""

from typing import Literal

ExportFormat = Literal["nemo", "huggingface", "safetensors", "onnx", "onnx-streaming"]
"""File format of `export_model`."""

WeightParts = Literal["all", "encoder"]
"""Parts of a model whose weights are loaded or written."""

FileFormat = Literal["npy", "safetensors"]
"""File format of extracted features."""

FeatureType = Literal["float32", "float16"]
"""Number type of extracted features."""

Kernels = Literal["auto", "torch"]
"""The setting `model.kernels`: `auto` is `default_forms` of the device, `torch` is operations of PyTorch."""

TrackerName = Literal["csv", "tensorboard", "wandb", "mlflow"]
"""Where `fit` logs metrics."""

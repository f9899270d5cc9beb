"""Which tests need a release of PyTorch with tensors of a GPU that does not exist."""

import pytest
import torch
from packaging.version import Version

needs_fake_gpu = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 11), reason="fake CUDA tensors need a driver in old releases of PyTorch"
)

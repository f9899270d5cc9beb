"""A mark for tests that need tensors of a GPU that does not exist."""

import pytest
import torch
from packaging.version import Version

needs_fake_gpu = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 11), reason="fake CUDA tensors need a driver in old releases of PyTorch"
)
"""PyTorch 2.7 asks the driver when such a tensor is made; 2.11 and 2.14 do not. Releases between were not tried."""

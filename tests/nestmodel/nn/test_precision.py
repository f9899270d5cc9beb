import pytest
import torch

from nestmodel.nn.precision import exact_matmul


@pytest.mark.gpu
def test_exact_matmul_ignores_tf32_on_a_gpu() -> None:
    left, right = torch.randn(64, 640), torch.randn(640, 16)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        product = exact_matmul(left.cuda(), right.cuda()).cpu()
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.allclose(product.double(), left.double() @ right.double(), atol=1e-5)

"""Trains small DDP models with and without gradients as views of the buckets, and prints digests of all gradients.

    python -m tests.distributed.gradient_views

Each line has the number of ranks, whether gradients are views, and the digests of all ranks. The ranks are forked, so
that torch is imported once.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 5
SKIPPED = (2, 3)
"""Steps whose gradients are set to None before the optimizer steps."""


def train(rank: int, world_size: int, store: Path, are_views: bool) -> str:
    """Trains for some steps of two microbatches, and returns a digest of all gradients and of the last weights."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
    ddp = DistributedDataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=are_views, bucket_cap_mb=0.01
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    generator, digest = torch.Generator().manual_seed(rank), hashlib.sha256()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(torch.randn(8, 32, generator=generator)).square().sum().backward()
        ddp(torch.randn(8, 32, generator=generator)).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            digest.update(parameter.grad.div_(7.0).numpy().tobytes())
            if step in SKIPPED:
                parameter.grad = None
        optimizer.step()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    torch.distributed.destroy_process_group()
    return digest.hexdigest()


def run(world_size: int, are_views: bool) -> list[str]:
    """Returns the digests of all ranks."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        children = {}
        for rank in range(world_size):
            if not (child := os.fork()):
                try:
                    (directory / str(rank)).write_text(train(rank, world_size, directory / "store", are_views))
                finally:
                    os._exit(0)
            children[child] = rank
        for child in children:
            os.waitpid(child, 0)
        return [(directory / str(rank)).read_text() for rank in range(world_size)]


def main() -> int:
    """Prints a line for each number of ranks and each kind of gradient."""
    torch.set_num_threads(1)
    for world_size in (1, 2, 3, 4):
        for are_views in (False, True):
            sys.stdout.write(" ".join([str(world_size), str(are_views), *run(world_size, are_views)]) + "\n")
            sys.stdout.flush()  # the ranks are forked from this process
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Section `device`: the GPU, the versions, and the settings that change numbers or speed."""

import importlib.metadata
import os
import platform

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.presets import peak_tflops
from benchmarks.gpu.report import Section

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING")


def measure_device(context: Context, section: Section) -> None:
    """Adds one row for each fact."""
    facts: dict[str, object] = {
        "ranks": context.world_size,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pytorch-lightning": importlib.metadata.version("pytorch-lightning"),
        "lhotse": importlib.metadata.version("lhotse"),
        "cores of this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **{name: os.environ.get(name, "not set") for name in _VARIABLES},
    }
    if context.is_cuda:
        properties = torch.cuda.get_device_properties(context.device)
        facts |= {
            "GPU": properties.name,
            "memory, GB": properties.total_memory / 1e9,
            "free, GB": torch.cuda.mem_get_info(context.device)[0] / 1e9,
            "peak, TFLOP/s in bf16": peak_tflops(properties.name) or "unknown GPU: no share of peak",
            "capability": f"{properties.major}.{properties.minor}",
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.nccl.is_available([]) else "none",
        }
    else:
        facts["GPU"] = f"none, {platform.machine()}"
    section.rows += [{"row": name, "value": value} for name, value in facts.items()]

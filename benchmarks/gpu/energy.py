"""Energy that a GPU has used, as its driver counts it."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def energy_counter(device: torch.device) -> Callable[[], float] | None:
    """Returns a function that reads the joules since the driver was loaded; None if the device does not count them.

    torch can read the power only, and only with another package installed. The driver's library NVML, which every
    machine with an NVIDIA GPU has, counts energy.
    """
    if device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return counter_of(library, f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def counter_of(library: Any, uuid: str) -> Callable[[], float] | None:
    """Returns the function for the GPU with this UUID; see `energy_counter`.

    Source: NVML API reference, `nvmlDeviceGetTotalEnergyConsumption`, which counts millijoules.
    """
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()

    def read() -> float:
        code = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return millijoules.value / 1000 if code == 0 else float("nan")

    is_found = (
        library.nvmlInit_v2() == 0
        and library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0
        and library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) == 0
    )
    return read if is_found else None

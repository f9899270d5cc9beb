"""Compiles code for an H100 that does not exist, and counts its launches and the instructions of its kernels.

`pretended_h100` answers the questions of torch's compiler to the GPU, and of Triton to its driver. Compiled code then
runs on fake tensors: its library calls as operations of torch, and each kernel in Triton, the compiler's or our own, as
an operation with the bytes of its operands and the instructions that its warps issue. Uses private parts of torch 2.11.
"""

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.scheduler as scheduler
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._library.custom_ops import OPDEFS
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.harness.fake_gpu import Operation, OperationLog, bytes_of, gradients

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    cc=90,
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
"""The properties of a GPU that torch's compiler reads. Source: NVIDIA's documentation of the H100 with SXM."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MEMORY = re.compile(r"\b(LDG|STG|LDS|STS|LDGSTS|HMMA|HGMMA|WGMMA|ATOM|RED)\b")


class Loop(NamedTuple):
    """Instructions of a loop, the first and the last one counted from the start of the code."""

    first: int
    last: int
    step: int
    """How often the compiler has unrolled it, times the step of its counter; 1 if it is not known."""


@dataclass(frozen=True)
class MachineCode:
    """Instructions of a kernel for sm_90, without subroutines, which are the slow paths of divisions."""

    num_instructions: int
    loops: tuple[Loop, ...]
    """Loops that read, write or multiply, in the order of their first instruction, so outer ones first."""

    num_registers: int
    """Registers of a thread."""

    stack_bytes: int
    """Stack of a thread, for values that do not fit into registers."""

    def issued(self, trips: Sequence[tuple[int, int]]) -> float:
        """Returns the instructions that a warp issues.

        Args:
            trips: Range and step of each loop of the source. If the compiler has made more loops, such as one for the
                rest of an unrolled loop, the loops with the fewest instructions run once.
        """
        largest = sorted(self.loops, key=lambda loop: loop.first - loop.last)[: len(trips)]
        factors = {}
        for loop, (extent, step) in zip(sorted(largest), trips, strict=False):
            unrolled = loop.step // step if loop.step in (2 * step, 4 * step, 8 * step) else 1
            factors[loop] = math.ceil(extent / (step * unrolled))
        return sum(
            math.prod(times for loop, times in factors.items() if loop.first <= i <= loop.last)
            for i in range(self.num_instructions)
        )


@cache
def disassemble(cubin: bytes) -> MachineCode:
    """Returns the instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([_TOOLS / "nvdisasm", "-c", file.name], text=True, stderr=subprocess.DEVNULL)
        usage = subprocess.check_output([_TOOLS / "cuobjdump", "--dump-resource-usage", file.name], text=True)
    resources = re.search(r"\bREG:(\d+) STACK:(\d+)", usage)
    assert resources is not None, usage
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in re.split(r"\.weak\s+\$__internal", text)[0].splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif (found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)) and found[1] != "NOP":
            code.append(found[1])
    loops = []
    for last, each in enumerate(code):
        branch = re.search(r"BRA\S* .*`\((\.L_\w+)\)", each)
        first = labels.get(branch[1], last) if branch else last
        if first < last and any(map(_MEMORY.search, code[first:last])):
            loops.append(Loop(first, last, _step(code[first : last + 1])))
    return MachineCode(len(code), tuple(sorted(loops)), int(resources[1]), int(resources[2]))


def _step(loop: Sequence[str]) -> int:
    """Returns the constant that a loop adds to the register which the condition of its last branch compares."""
    predicate = re.match(r"@!?(U?P\d)", loop[-1])
    if predicate is None:
        return 1
    condition = re.compile(rf"U?ISETP\S* {predicate[1]}, (.*)")
    compared = next((found[1] for each in reversed(loop) if (found := condition.match(each))), "")
    added = re.compile(r"U?(?:IADD3|VIADD) (U?R\d+), (?:U?P\d, )?\1(?:\.reuse)?, (-?0x[0-9a-f]+)")
    steps = [found for each in loop if (found := added.match(each))]
    own = [found for found in steps if found[1] in re.findall(r"\bU?R\d+", compared)]
    return max((abs(int(found[2], 16)) for found in own), default=1)


@cache
def _trips_of_source(kernel: Any, extents: tuple[tuple[str, int], ...]) -> list[tuple[int, int]]:
    """Returns range and step of each `tl.range` of a generated kernel, whose sizes are arguments or in its text."""
    sizes = dict(re.findall(r"(\w+_?numel|R\d_BLOCK)(?:: tl\.constexpr)? = (\d+)$", kernel.src, re.MULTILINE))
    known = {**{name: int(size) for name, size in sizes.items()}, **dict(extents)}
    known["split_size"] = known.get("RSPLIT_SIZE", 1)
    loops = re.findall(r"tl\.range\(\w+, (\w+), (\w+)", kernel.src)
    return [(known[extent], known[step]) for extent, step in loops]


class LaunchLog(OperationLog):
    """Records the launches of compiled code and of custom operations, whose kernels are compiled for an H100.

    Args:
        namespace: Custom operations of this namespace are opened: what their implementation calls is recorded.
        trips: Range and step of each loop of our own kernels, from outer to inner ones, by the kernel's name: a
            function of its arguments by name and of the number of programs. Loops of other kernels count once.
    """

    def __init__(self, namespace: str, trips: Mapping[str, Any]) -> None:
        super().__init__()
        self.namespace, self._trips = namespace, trips

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and records it, or the operations that it consists of."""
        definition = OPDEFS.get(func.name().split(".")[0])
        if definition is None or definition._namespace != self.namespace:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self, patch("nestmodel.nn.gpu.devices.has_kernel", lambda *_: True):
            return definition._init_fn(*args, **(kwargs or {}))

    def launched(self, name: str, kernel: Any, grid: Sequence[int], arguments: Mapping[str, Any]) -> None:
        """Records a kernel of our own."""
        code, programs = disassemble(kernel.asm["cubin"]), math.prod(grid)
        trips = self._trips[name](arguments, programs) if name in self._trips else []
        self._add(name, code.issued(trips) * kernel.metadata.num_warps * programs, bytes_of(list(arguments.values())))

    def generated(self, tuner: Any, arguments: Sequence[Any]) -> None:
        """Records a kernel that torch's compiler wrote, in the configuration that issues the fewest instructions."""
        num_bytes = round(1e9 * tuner.inductor_meta["kernel_num_gb"])
        self._add(tuner.fn.__name__, min(issued for _, issued, _ in configurations(tuner, arguments)), num_bytes)

    def _add(self, name: str, warp_instructions: float, num_bytes: int) -> None:
        self.operations.append(
            Operation(name=name, num_bytes=num_bytes, warp_instructions=warp_instructions, **self.current())
        )


_COMPILED: dict[tuple[str, str], Any] = {}


def configurations(tuner: Any, arguments: Sequence[Any]) -> list[tuple[Any, float, MachineCode]]:
    """Returns the configurations that torch times on a GPU, with the instructions that all warps issue, and the code.

    Args:
        tuner: A generated kernel.
        arguments: Arguments of a launch, without constants.
    """
    names = [name for name in tuner.fn.arg_names if not tuner.fn.params[tuner.fn.arg_names.index(name)].is_constexpr]
    sizes = {name: int(value) for name, value in zip(names, arguments, strict=False) if isinstance(value, int)}
    found = []
    for config in tuner.configs:
        key = tuner.fn.src, str(config)
        if key not in _COMPILED:
            _COMPILED[key] = tuner._precompile_config(config).kernel
        kernel, known = _COMPILED[key], {**sizes, **config.kwargs}
        programs = math.prod(triton_heuristics.GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(known))
        code = disassemble(kernel.asm["cubin"])
        issued = code.issued(_trips_of_source(tuner.fn, tuple(known.items())))
        found.append((config, issued * kernel.metadata.num_warps * programs, code))
    return found


_LOGS: list[LaunchLog] = []


@contextmanager
def recording(log: LaunchLog) -> Iterator[None]:
    """Records operations and launches of the block. Functions must have been compiled before, by the same calls."""
    _LOGS.append(log)
    try:
        with log:
            yield
    finally:
        _LOGS.pop()


def _launch_generated(tuner: Any, *arguments: Any, **_: Any) -> None:
    for log in _LOGS:
        log.generated(tuner, arguments)


_run_jit = JITFunction.run


def _launch_own(function: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
    kernel = _run_jit(function, *args, grid=grid, **{**kwargs, "warmup": True})  # compiles only
    arguments = {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
    for log in _LOGS:
        log.launched(function.__name__, kernel, grid(arguments) if callable(grid) else grid, arguments)
    return kernel


class _Driver:
    """The functions of its driver that Triton calls."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


_generate_kernel: Any = TritonKernel.codegen_kernel
_choose_configurations: Any = triton_heuristics._persistent_reduction_configs


def _kernel_with_bytes(kernel: Any, name: Any = None) -> Any:
    with inductor_config.patch(profile_bandwidth="1"):  # writes the bytes of the operands beside the code
        return _generate_kernel(kernel, name)


def _configurations_of_gpu(*args: Any, **kwargs: Any) -> Any:
    with patch.object(torch.cuda, "is_available", lambda: True):
        return _choose_configurations(*args, **kwargs)


def _view(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


@contextmanager
def pretended_h100() -> Iterator[None]:
    """Answers questions of torch's compiler to the GPU and its driver as an H100 would, and launches nothing."""
    nothing = lambda *_, **__: None  # noqa: E731
    properties = lambda *_, **__: H100  # noqa: E731
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", lambda *_, **__: (9, 0)),
        (torch.cuda, "is_available", lambda: False),  # otherwise, patterns of attention would be traced on the GPU
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "set_device", nothing),
        (torch.cuda, "_DeviceGuard", lambda *_: nullcontext()),
        (torch.cuda, "device_of", lambda *_: nullcontext()),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.empty(16, dtype=torch.uint8, device="cpu")),
        (torch.cuda, "set_rng_state", nothing),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        (torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False),
        (torch._C._dynamo.guards, "_empty_strided_cuda", _empty),
        (torch._C._dynamo.guards, "_reinterpret_tensor", _view),
        (CudaInterface.Worker, "get_device_properties", staticmethod(properties)),
        (CudaInterface, "get_device_properties", staticmethod(properties)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_, **__: 90)),
        (scheduler, "has_triton", lambda *_: True),
        (compile_fx, "_check_triton_bf16_support", nothing),
        (triton.runtime.driver, "_active", _Driver()),
        (triton_helpers, "set_driver_to_gpu", nothing),
        (triton_heuristics.CachingAutotuner, "precompile", nothing),
        (triton_heuristics.CachingAutotuner, "run", _launch_generated),
        (triton_heuristics.DebugAutotuner, "run", _launch_generated),
        (triton_heuristics, "_persistent_reduction_configs", _configurations_of_gpu),
        (TritonKernel, "codegen_kernel", _kernel_with_bytes),
        (JITFunction, "run", _launch_own),
        (torch.autograd, "grad", gradients),
    ]
    settings = {
        "joint_graph_constant_folding": False,
        "shape_padding": False,  # it times real products
        "force_disable_caches": True,
        "size_asserts": False,
        "alignment_asserts": False,
        "compile_threads": 1,
        "use_static_cuda_launcher": False,
    }
    with ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(inductor_config.patch(settings))
        yield

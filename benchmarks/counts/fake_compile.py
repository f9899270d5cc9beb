"""Drives torch's compiler for a GPU that does not exist, and counts the kernels that it would launch.

The graphs of a function are traced on fake tensors, and torch's compiler generates the code for
an H100 from them. The code is counted and read, but neither loaded nor run. What asks the GPU is switched off or
answered here: folding of constants, padding of shapes, which times real products, and the properties of the device.
Uses private functions of torch 2.11.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.scheduler as scheduler
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from benchmarks.counts.fake_gpu import gradients

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
"""What torch's compiler reads of a GPU. Source: NVIDIA's documentation of the H100 with SXM."""


@dataclass(frozen=True)
class Generated:
    """Kernels of one graph."""

    num_triton: int
    """Kernels that the compiler wrote."""

    num_library: int
    """Calls of library kernels, such as matrix products."""

    triton_bytes: int
    """Bytes that these kernels read and write, each buffer once."""

    library_bytes: int
    """The same for the library calls."""


class _Done(BaseException):
    """Ends the compilation when the code is generated; no exception, so that nothing catches it on the way."""


def generate(function: Callable[..., Tensor], inputs: Sequence[Any], mode: Any) -> tuple[Generated, Generated]:
    """Returns the code for the forward and the backward pass of a function of fake tensors.

    Args:
        function: Computes one tensor from the inputs.
        inputs: Its arguments, nested in lists, tuples and dictionaries or not.
        mode: Fake mode of the tensors.
    """
    graphs: list[torch.fx.GraphModule] = []

    def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        _recursive_joint_graph_passes(joint)
        graphs.extend(min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **settings))
        raise _Done

    def unused(*_: Any) -> Any:
        raise AssertionError("the partition ends the tracing")

    with _compiling(mode):
        _trace(function, inputs, unused, partition_fn=partition)
        forward, backward = graphs
        return _generate(forward, is_backward=False), _generate(backward, is_backward=True)


def generate_forward(function: Callable[..., Tensor], inputs: Sequence[Any], mode: Any) -> Generated:
    """Returns the code for a function of fake tensors without gradients; see `generate`."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        _recursive_joint_graph_passes(graph)
        graphs.append(graph)
        raise _Done

    with _compiling(mode):
        _trace(function, inputs, keep)
        return _generate(graphs[0], is_inference=True)


@contextmanager
def _compiling(mode: Any) -> Iterator[None]:
    with (
        _pretended_h100(),
        torch.device("cpu"),  # what the compiler itself computes
        patch.object(torch.compiler, "is_compiling", lambda: True),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
    ):
        yield


def _trace(function: Callable[..., Tensor], inputs: Sequence[Any], compiler: Callable[..., Any], **keep: Any) -> None:
    try:
        aot_function(function, compiler, compiler, decompositions=select_decomp_table(), **keep)(*inputs)
    except _Done:
        pass


def _generate(graph: torch.fx.GraphModule, *, is_backward: bool = False, is_inference: bool = False) -> Generated:
    found: list[Generated] = []

    def keep(lowering: GraphLowering) -> Any:
        code, _ = lowering.codegen()
        source: Any = getattr(code, "value", code)  # earlier releases of torch return the text itself
        body = source[source.index("def call(") :]
        num_bytes = {True: 0, False: 0}  # by whether a library has the kernel
        for node in lowering.scheduler.nodes:
            if not isinstance(node, scheduler.NopKernelSchedulerNode):
                num_bytes[isinstance(node, scheduler.ExternKernelSchedulerNode)] += node.get_read_write_buffers_sizes()
        found.append(
            Generated(
                num_triton=len(re.findall(r"\.run\(", body)),
                num_library=len(re.findall(r"(?:extern_kernels\.\w+|torch\.ops\.aten\.[\w.]+)\(", body)),
                triton_bytes=num_bytes[False],
                library_bytes=num_bytes[True],
            )
        )
        raise _Done

    examples = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
    with patch.object(GraphLowering, "_compile_to_module", keep):
        try:
            compile_fx.compile_fx_inner(
                graph, examples, is_backward=is_backward, is_inference=is_inference, static_input_idxs=[]
            )
        except _Done:
            pass
    return found[0]


@contextmanager
def _pretended_h100() -> Iterator[None]:
    """Answers for an H100 what torch's compiler asks the GPU, and Triton its driver."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        """What code generation reads of Triton's driver."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_device_interface(self) -> Any:
            return torch.cuda

    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", lambda *_, **__: H100),
        (torch.cuda, "get_device_capability", lambda *_, **__: (9, 0)),
        (torch.cuda, "is_available", lambda: False),  # or patterns of attention would be traced on it
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.empty(16, dtype=torch.uint8, device="cpu")),
        (torch.cuda, "set_rng_state", lambda *_, **__: None),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_, **__: H100)),
        (CudaInterface, "get_device_properties", staticmethod(lambda *_, **__: H100)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_, **__: 90)),
        (scheduler, "has_triton", lambda *_: True),
        (compile_fx, "_check_triton_bf16_support", lambda _: None),
        (triton.runtime.driver, "_active", Driver()),
        (torch.autograd, "grad", gradients),
    ]
    settings = {
        "joint_graph_constant_folding": False,
        "shape_padding": False,
        "fx_graph_cache": False,
        "force_disable_caches": True,
    }
    with ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(inductor_config.patch(settings))
        yield

"""Code for GPUs without a GPU: in a process of its own, interpreted on a CPU, and compiled for GPUs."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
ARCHITECTURES = (80, 90)
"""Of an A100 and of an H100."""


def run_interpreted(code: str) -> None:
    """Runs code that calls kernels on a CPU, alone, as Triton reads at its import whether to interpret kernels."""
    run_alone(code, TRITON_INTERPRET="1")


def run_alone(code: str, *arguments: str, **environment: str) -> str:
    """Runs code in a process of its own and returns its output; fails with what it wrote if it fails."""
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, **environment}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=REPOSITORY)
    assert run.returncode == 0, run.stderr
    return run.stdout


class Compiled(NamedTuple):
    """A kernel for one architecture."""

    ptx: str
    num_registers: int
    """Of a thread."""


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> list[Compiled]:
    """Compiles a kernel for both architectures, and checks that no value has to leave the registers.

    Args:
        kernel: A function with `triton.jit`.
        types: Types of arguments by name; those that are missing are int32.
        constants: Values of constant arguments.
        options: Of the compilation.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    # As at a launch, tensors and what is named `dim` start at, or are, multiples of 16.
    aligned = [number for number, name in enumerate(kernel.arg_names) if types[name][0] == "*" or name == "dim"]
    attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
    compiled = []
    for architecture in ARCHITECTURES:
        source = ASTSource(kernel, types, constants, attributes)
        found = compile_source(source, target=GPUTarget("cuda", architecture, 32), options=options).asm
        num_registers, stack_bytes = _resources(found["cubin"])
        assert stack_bytes == 0, f"{kernel.__name__} spills registers on sm_{architecture} with {types}"
        compiled.append(Compiled(found["ptx"], num_registers))
    return compiled


def _resources(machine_code: bytes) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes of its stack, which holds what does not fit into registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        text = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    found = re.search(r"\bREG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])

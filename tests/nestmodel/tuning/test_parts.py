import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins.precision import MixedPrecision

from nestmodel import Kernels, NestNetwork
from nestmodel.nn.gpu.kernel_choice import PARTS
from nestmodel.tuning import parts
from nestmodel.tuning.parts import FORMS, Precision, Setting
from nestmodel.tuning.race import Limits, Part, Race, relative_errors
from nestmodel.tuning.stopwatch import stopwatch
from tests.training import tiny_config

REPOSITORY = Path(__file__).parents[3]
CPU = torch.device("cpu")
SETTING = Setting(config=tiny_config(), num_cuts=3, num_samples=16000, num_shapes=2, precision="32-true")
FULL = Precision(device=CPU, convert=lambda module: module, context=nullcontext)
MIXED = MixedPrecision("bf16-mixed", "cpu")
HALF = Precision(device=CPU, convert=MIXED.convert_module, context=MIXED.train_step_context)


def part(name: str, setting: Setting = SETTING, precision: Precision = FULL) -> Part:
    (found,) = parts.parts(setting, precision, [name])
    return found


def test_all_parts_but_the_whole_step_are_built_at_once() -> None:
    assert FORMS.keys() == set(PARTS)
    assert [found.name for found in parts.parts(SETTING, FULL, PARTS)] == ["features", "subsampling", "blocks"]


def test_compiled_forms_are_raced_for_fixed_shapes_only() -> None:
    assert list(part("blocks").forms) == ["torch", "compiled", "combined"]
    varying = replace(SETTING, num_shapes=None)
    assert [found.name for found in parts.parts(varying, FULL, PARTS)] == ["subsampling"]


@pytest.mark.parametrize("name", ["features", "subsampling", "blocks"])
def test_a_run_computes_the_same_each_time_and_no_gradient_is_missing(name: str) -> None:
    run = part(name).forms["torch"]()
    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(value.abs().sum() > 0 for value in first)
    assert len(first) == {"features": 1, "subsampling": 13, "blocks": 39}[name]


@pytest.mark.parametrize("name", ["features", "subsampling", "blocks"])
@pytest.mark.parametrize(("precision", "largest"), [(FULL, 1e-4), (HALF, 0.2)], ids=["float32", "bfloat16"])
def test_the_plain_form_is_as_close_to_its_reference_as_the_precision_allows(
    name: str, precision: Precision, largest: float
) -> None:
    found = part(name, precision=precision)
    is_full = precision is FULL or name == "features"
    assert found.ulp == torch.finfo(torch.float32 if is_full else torch.bfloat16).eps
    expected = found.reference()()
    assert {value.dtype for value in expected} == {torch.float64 if is_full else torch.float32}
    errors = relative_errors(found.forms["torch"]()(), expected, found.norm_floor)
    assert 0 < max(errors) < largest


def test_the_backward_pass_is_outside_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    grad = torch.autograd.grad

    def record(*arguments: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return grad(*arguments)

    run = part("blocks", precision=HALF).forms["torch"]()
    monkeypatch.setattr(torch.autograd, "grad", record)
    run()
    assert seen == [False]


def test_sizes_are_those_of_a_microbatch() -> None:
    assert [value.shape for value in part("features").forms["torch"]()()] == [(6, 80, 112)]
    assert part("subsampling").forms["torch"]()()[0].shape == (3, 14, 16)
    assert part("blocks").forms["torch"]()()[0].shape == (3, 14, 16)


def test_dropout_that_a_generator_draws_is_off() -> None:
    config = tiny_config(dropout=0.5, dropout_source="generator")
    run = part("blocks", replace(SETTING, config=config)).forms["torch"]()
    torch.manual_seed(0)
    first = run()
    assert torch.equal(first[0], run()[0])


def test_each_form_is_set_in_a_network_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[Kernels, int | None]] = []

    def use_kernels(_network: NestNetwork, kernels: Kernels, *, num_shapes: int | None) -> None:
        used.append((kernels, num_shapes))

    monkeypatch.setattr(NestNetwork, "use_kernels", use_kernels)
    for build in part("blocks").forms.values():
        build()
    plain = Kernels(features="torch", subsampling="torch", blocks="torch", step="torch")
    assert used == [(plain, 2), (replace(plain, blocks="compiled"), 2), (replace(plain, blocks="combined"), 2)]


def test_the_reference_multiplies_in_full_precision() -> None:
    seen = []
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:

        def run() -> list[torch.Tensor]:
            seen.append(matmul.allow_tf32)
            return []

        parts._with_exact_products(run)()
        assert seen == [False]
        assert matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before


COMPILED = """
import sys
from functools import partial
import torch
from nestmodel.nn.gpu import devices
from nestmodel.tuning.race import Limits, Race
from nestmodel.tuning.stopwatch import stopwatch
from tests.nestmodel.tuning.test_parts import CPU, FULL, HALF, part

races = [("blocks", FULL), ("blocks", HALF), ("features", FULL)]
if sys.argv[1] == "gpu":
    # Without generating code: all steps of the compiler before that, as for a GPU.
    devices.is_on_gpu = lambda x: True
    torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")
    races.pop()
for name, precision in races:
    for row in Race(stopwatch(CPU), Limits(form_s=0.0)).rows(part(name, precision=precision)):
        print(row.form, row.verdict, row.reason)
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", ["cpu", "gpu"])
def test_compiled_forms_are_correct(code: str, tmp_path: Path) -> None:
    # In a process of its own, because the compiler cannot trace the annotation checks that tests enable; with a cache
    # of its own, because torch reuses code that was generated for another instruction set.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED, code]
    outcome = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line.split() for line in outcome.stdout.splitlines()]
    blocks = ["torch", "compiled", "combined"]
    features = ["torch", "compiled"] if code == "cpu" else []
    assert [form for form, *_ in lines] == [*blocks, *blocks, *features], outcome.stderr
    assert {tuple(verdict) for _, *verdict in lines} == {("taken",), ("slower",)}


def test_a_block_that_drops_other_values_is_wrong() -> None:
    # Stands for a form that decides differently about what is dropped.
    found = part("blocks", replace(SETTING, config=tiny_config(dropout=0.1)), HALF)
    other = part("blocks", replace(SETTING, config=tiny_config(dropout=0.0)), HALF)
    forms = {"torch": found.forms["torch"], "other": other.forms["torch"]}
    rows = Race(stopwatch(CPU), Limits(form_s=0.0)).rows(replace(found, forms=forms))
    assert [row.verdict for row in rows] == ["taken", "wrong"]

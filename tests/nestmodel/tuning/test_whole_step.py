from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nestmodel import Kernels
from nestmodel.nn.gpu import devices
from nestmodel.nn.gpu.kernel_choice import default_kernels
from nestmodel.nn.gpu.step_graph import StepGraphs
from nestmodel.nn.loss import LossStats
from nestmodel.nn.network_input import NetworkInput
from nestmodel.tuning import whole_step
from nestmodel.tuning.race import Limits, Part, Race, Row, relative_errors
from nestmodel.tuning.stopwatch import stopwatch
from nestmodel.tuning.whole_step import has_step_forms, step_part
from tests.nestmodel.tuning.test_parts import CPU, FULL, HALF, SETTING
from tests.tape import TapeCapture
from tests.training import tiny_config

KERNELS = default_kernels("cpu")
FORWARD = StepGraphs.forward


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[TapeCapture]:
    """Lets graphs be captured on a CPU, by a stand-in that records operations; returns all of them."""
    made: list[TapeCapture] = []

    def make() -> TapeCapture:
        made.append(TapeCapture())
        return made[-1]

    monkeypatch.setattr(devices, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(whole_step, "CudaCapture", make)
    return made


def rows_of(part: Part) -> list[Row]:
    return Race(stopwatch(CPU), Limits(form_s=0.0)).rows(part)


@pytest.mark.parametrize("precision", [FULL, HALF], ids=["float32", "bfloat16"])
def test_a_graph_computes_what_the_plain_form_computes(captures: list[TapeCapture], precision: object) -> None:
    part = step_part(SETTING, precision, KERNELS)  # type: ignore[arg-type]  # one of two
    plain, graph = (part.forms[form]() for form in ("torch", "graph"))
    expected = [value.clone() for value in plain()]
    assert len(expected) > 50
    for _ in range(2):  # gradients are not added to those of an earlier call
        assert max(relative_errors(graph(), expected, part.norm_floor)) < 4 * part.ulp
    (capture,) = captures
    assert capture.num_captures == 2  # forward and backward pass
    assert capture.num_replays == 2 * 3  # the first is that of another microbatch
    assert {row.verdict for row in rows_of(part)} <= {"taken", "slower"}


def test_all_blocks_take_part() -> None:
    layers = tiny_config().encoder.num_layers
    assert layers > 1
    found = [
        len(step_part(replace(SETTING, config=config), FULL, KERNELS).forms["torch"]()())
        for config in (tiny_config(), replace(tiny_config(), encoder=replace(tiny_config().encoder, num_layers=1)))
    ]
    assert found[0] > found[1]


@pytest.mark.usefixtures("captures")
def test_a_capture_that_fails_is_named_and_the_plain_form_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_step, "CudaCapture", lambda: TapeCapture(0, RuntimeError("planted")))
    plain, graph = rows_of(step_part(SETTING, FULL, KERNELS))
    assert (plain.verdict, graph.verdict) == ("taken", "failed")
    assert "a capture failed: planted" in graph.reason


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("precision", [FULL, HALF], ids=["float32", "bfloat16"])
def test_a_graph_that_computes_the_microbatch_that_was_captured_is_wrong(
    precision: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_step.StepGraphs, "forward", _forward_of_first)
    plain, graph = rows_of(step_part(SETTING, precision, KERNELS))  # type: ignore[arg-type]  # one of two
    assert (plain.verdict, graph.verdict) == ("taken", "wrong")


def _forward_of_first(graphs: StepGraphs, batch: NetworkInput) -> LossStats | None:
    """Stands for a graph whose inputs are not copied: all microbatches are the first one."""
    first = vars(graphs).setdefault("first", batch)
    return FORWARD(graphs, first)


@pytest.mark.usefixtures("captures")
def test_a_graph_without_small_gradients_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = whole_step.StepGraphs.backward

    def without_biases(graphs: StepGraphs) -> None:
        backward(graphs)
        for name, parameter in graphs._network.named_parameters():
            if name.endswith("pos_bias_u"):
                parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(whole_step.StepGraphs, "backward", without_biases)
    plain, graph = rows_of(step_part(SETTING, FULL, KERNELS))
    assert (plain.verdict, graph.verdict) == ("taken", "wrong")


@pytest.mark.usefixtures("captures")
def test_a_graph_that_adds_other_gradients_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(TapeCapture):
        def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
            replay = super().__call__(work)

            def twice() -> None:
                replay()
                replay()

            return twice

    monkeypatch.setattr(whole_step, "CudaCapture", Twice)
    plain, graph = rows_of(step_part(SETTING, FULL, KERNELS))
    assert (plain.verdict, graph.verdict) == ("taken", "wrong")


def test_other_parts_have_the_forms_that_a_run_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Kernels] = []
    monkeypatch.setattr(whole_step.NestNetwork, "use_kernels", lambda _network, kernels, **_: used.append(kernels))
    given = Kernels(features="torch", subsampling="triton", blocks="combined", step="graph")
    step_part(SETTING, FULL, given).forms["torch"]()
    assert used == [replace(given, step="torch")]


def test_a_microbatch_can_be_a_graph_only_with_settings_that_a_capture_can_follow() -> None:
    assert has_step_forms(SETTING)
    assert not has_step_forms(replace(SETTING, num_shapes=None))
    assert not has_step_forms(replace(SETTING, precision="16-mixed"))
    assert not has_step_forms(replace(SETTING, config=tiny_config(checkpoint_activations=True)))
    assert has_step_forms(replace(SETTING, config=tiny_config(att_context_size=((8, 2),))))
    assert not has_step_forms(replace(SETTING, config=tiny_config(att_context_size=((8, 2), (8, 0)))))


def test_the_reference_of_a_step_is_the_plain_form() -> None:
    part = step_part(SETTING, FULL, KERNELS)
    expected, found = part.reference()(), part.forms["torch"]()()
    assert part.ulp == torch.finfo(torch.float32).eps
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

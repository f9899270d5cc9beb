"""A whole microbatch as a computation that can be raced: launched operation by operation, or as CUDA graphs.

Unlike the other parts, it has all blocks of the model, because graphs save launches: with one block, they would seem to
save few. The other parts are in the forms already chosen. Both forms call the same operations, so the plain one is
the reference.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nestdata import AudioNoiseBatch, MicrobatchKey, Mix
from nestmodel.nn.gpu.kernel_choice import TORCH, Kernels
from nestmodel.nn.gpu.step_graph import CudaCapture, StepGraphs
from nestmodel.nn.loss import LossStats, loss_stats
from nestmodel.nn.network import NestNetwork
from nestmodel.nn.network_input import NetworkInput
from nestmodel.nn.precision import product_dtype
from nestmodel.tuning.parts import FORMS, Precision, Setting, build_network, noise, shortened_lens
from nestmodel.tuning.race import Part, Run


def has_step_forms(setting: Setting) -> bool:
    """Returns whether a microbatch can be a graph with these settings; see `NestModel.use_graphs`."""
    encoder = setting.config.encoder
    can_be_captured = not encoder.checkpoint_activations and len(encoder.att_context_size) == 1
    return setting.num_shapes is not None and can_be_captured and setting.precision != "16-mixed"


def step_part(setting: Setting, precision: Precision, kernels: Kernels) -> Part:
    """Returns the microbatch.

    Args:
        setting: Sizes, for which a microbatch can be a graph.
        precision: Of the run.
        kernels: The forms of the other parts.
    """
    build = partial(_build, setting, precision, replace(kernels, step=TORCH))
    with precision.context():
        ulp = torch.finfo(product_dtype(torch.zeros(1, device=precision.device))).eps
    forms = {form: partial(build, form) for form in FORMS["step"]}
    # Both forms call the same operations, so that even small gradients agree.
    return Part(name="step", reference=partial(build, TORCH), forms=forms, ulp=ulp, norm_floor=1e-3)


def _build(setting: Setting, precision: Precision, kernels: Kernels, form: str) -> Run:
    network = build_network(setting, precision, kernels, num_layers=setting.config.encoder.num_layers)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    other, batch = (_batch(network, setting, number) for number in range(2))
    if form == TORCH:
        inputs = NetworkInput.of(batch, network.draw_masks(batch), precision.device)

        def run_plainly() -> LossStats:
            with precision.context():
                stats = loss_stats(network.forward_masked(inputs))
            stats.nll_sum.backward()
            return stats

        return _with_fresh_gradients(run_plainly, parameters)
    graphs = StepGraphs(network, 1, CudaCapture(), num_microbatches=1, num_ranks=1)
    # Of another microbatch than the one that counts, so that nothing of it can be part of the graph.
    warm_up = _with_fresh_gradients(_graph(graphs, network, other, precision), parameters)
    for _ in range(2):  # warms up, and captures
        warm_up()
    return _with_fresh_gradients(_graph(graphs, network, batch, precision), parameters)


def _graph(
    graphs: StepGraphs, network: NestNetwork, batch: AudioNoiseBatch, precision: Precision
) -> Callable[[], LossStats]:
    inputs = NetworkInput.of(batch, graphs.pad(network.draw_masks(batch)), precision.device)

    def replay() -> LossStats:
        # A capture that fails warns, and the run goes on without graphs. Here, it is an error.
        with precision.context(), warnings.catch_warnings(action="error", category=UserWarning):
            stats = graphs.forward(inputs)
        if stats is None:
            raise RuntimeError("the scored rows are more than a graph takes")
        graphs.backward()
        return stats

    return replay


def _with_fresh_gradients(run: Callable[[], LossStats], parameters: list[torch.nn.Parameter]) -> Run:
    """Returns a computation of the gradients of the loss, which are not added to earlier ones.

    The loss itself would hide gradients that are wrong, by its norm.
    """

    def run_anew() -> Sequence[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        run()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    return run_anew


def _batch(network: NestNetwork, setting: Setting, number: int) -> AudioNoiseBatch:
    """Returns a microbatch of noise, on the CPU; another one for each number."""
    audio = 0.05 * noise(network, setting.num_cuts, setting.num_samples).cpu().float().roll(number, -1)
    lens = shortened_lens(network, setting.num_cuts, setting.num_samples).cpu()
    return AudioNoiseBatch(
        audio=audio,
        audio_len=lens,
        noise=audio,
        noise_len=lens,
        noisy_audio=2 * audio,
        noisy_audio_len=lens,
        sample_id=["noise"] * setting.num_cuts,
        mixes=[Mix(mode="none")] * setting.num_cuts,
        bad_cuts=[],
        key=MicrobatchKey(0, number, 0),
    )

import torch

from nestdata import MicrobatchKey
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.loss import LossStats
from nestmodel.nn.network_input import NetworkInput
from nestmodel.training.step_stats import StepStats, StopRequests, add_decayed


def stats_of(tokens: list[float], predicted: list[float]) -> LossStats:
    number = torch.tensor(1.0)
    return LossStats(number, number, number, torch.tensor([tokens]), torch.tensor([predicted]))


def input_of(num_samples: int) -> NetworkInput:
    """Returns a microbatch of one silent utterance, of which nothing is masked."""
    audio, nothing = torch.zeros(1, num_samples), torch.zeros(1, 1, dtype=torch.bool)
    return NetworkInput(
        audio=audio,
        audio_len=torch.tensor([num_samples]),
        noisy_audio=audio,
        num_samples=num_samples,
        is_masked=nothing,
        is_scored=nothing,
        scored_rows=torch.zeros(0, dtype=torch.int64),
        sample_id=["a"],
        mixes=[],
        bad_cuts=[],
        key=MicrobatchKey(0, 0),
    )


def test_the_numbers_of_a_step_are_summed_over_microbatches_and_ranks() -> None:
    norm = StepBatchNorm(2)
    norm.start_collecting()
    vectors = []
    for rank, num_samples in enumerate([(100, 60), (40, 39, 38)]):
        step = StepStats([norm], num_codebooks=1)
        for number in num_samples:
            norm(torch.full((1, 2, 3), 1.0 + rank))
            step.add(stats_of([1.0, 0.0], [0.0, 1.0]), input_of(number))
        vectors.append(step.flatten(StopRequests(preempted_here=rank == 1)))
    stats, numbers, norm_statistics = StepStats([norm], num_codebooks=1).unflatten(torch.stack(vectors).sum(0))
    assert {name: value.item() for name, value in numbers.items()} == {
        "num_nonfinite": 0,
        "num_preempted": 1,
        "num_out_of_time": 0,
        "num_samples": 277,
        "num_microbatches": 5,
    }
    assert stats.num_tokens.item() == 5
    torch.testing.assert_close(norm_statistics[0][0], torch.full((2,), (2 * 1.0 + 3 * 2.0) / 5))


def test_class_counts_decay_by_a_two_hundredth_per_step() -> None:
    first = add_decayed(None, stats_of([200.0, 0.0], [0.0, 400.0]))
    assert first.tolist() == [[[200.0, 0.0]], [[0.0, 400.0]]]
    second = add_decayed(first, stats_of([1.0, 2.0], [3.0, 0.0]))
    torch.testing.assert_close(second, torch.tensor([[[200.0, 2.0]], [[3.0, 398.0]]]))

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestdata import AudioNoiseDataset, AugmentConfig, BatchPlan, ConfigError, PlanConfig, batch_digest, microbatches
from nestdata.batch.augment import Chain
from nestmodel import DataConfig, NestDataModule
from nestmodel.training.resume_checks import check_unchanged
from tests.conftest import MessyCorpora
from tests.nestdata.batch import own_transforms as own
from tests.synthesis import chirp, hiss

RATE, HERE = 16000, "tests.nestdata.batch.own_transforms"
SPEECH = chirp(100, 3000, 1.0) + hiss(RATE, 0, level=0.01)
ECHO: dict[str, Any] = {"class_path": f"{HERE}.Echo", "init_args": {"level": 0.8}}


def dataset_of(speech: Path, *transforms: Any) -> AudioNoiseDataset:
    plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=8.0, microbatches_per_step=2))
    return AudioNoiseDataset(speech, plan, augment=AugmentConfig(speech=list(transforms)))


def test_an_own_transform_gets_a_generator_that_only_the_key_decides() -> None:
    chain = Chain([own.Echo(0.8)], RATE, name="augment.speech")
    before = SPEECH.copy()
    found = {key: chain(SPEECH, 0, key) for key in range(20)}
    assert len({samples.tobytes() for samples in found.values()}) == 20
    for key in reversed(range(20)):
        np.testing.assert_array_equal(Chain([ECHO], RATE, name="augment.speech")(SPEECH, 0, key), found[key])
        # Nothing but the level of the echo is drawn.
        level = (found[key] - SPEECH)[48:] / np.where(SPEECH[:-48], SPEECH[:-48], np.nan)
        assert 0.0 < np.nanmedian(level) < 0.8
    np.testing.assert_array_equal(SPEECH, before)


def test_own_transforms_may_write_to_their_argument_and_be_parts_of_compositions() -> None:
    before = SPEECH.copy()
    specs: list[Any] = [own.halve_in_place, {"OneOf": {"transforms": [own.halve_in_place], "p": 1.0}}]
    np.testing.assert_array_equal(Chain(specs, RATE, name="augment.speech")(SPEECH, 0), SPEECH / 4)
    np.testing.assert_array_equal(SPEECH, before)


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_batches_with_own_transforms_do_not_depend_on_the_process(messy_corpora: MessyCorpora) -> None:
    dataset = dataset_of(messy_corpora.speech, own.Echo(0.8), "PolarityInversion", own.halve_in_place, ECHO)
    indices = microbatches(dataset.plan, num_steps=3)
    expected = [batch_digest(batch) for batch in dataset.loader(indices)]
    plain = AudioNoiseDataset(messy_corpora.speech, dataset.plan)
    for index in indices:
        assert torch.equal(plain[index].audio, dataset[index].audio)
    workers = dataset.loader(indices, num_workers=2, start_method="forkserver")
    assert [batch_digest(batch) for batch in workers] == expected
    assert batch_digest(pickle.loads(pickle.dumps(dataset))[2, 1]) == expected[5]


MISTAKES: list[tuple[Any, str]] = [
    (own.Fading(), "is 'Fading': expected equal results for equal calls: draw from rng only"),
    (own.Following(), "is 'Following': expected equal results"),
    (own.drawn_by_torch, "is 'drawn_by_torch': expected equal results"),
    (own.without_rng, r"without_rng fails when called with \(samples, sampling_rate, rng\): TypeError: .*2 positional"),
    (own.shorter, r"shorter returns samples of shape \(15999,\) for \(16000,\)"),
    (own.returning_nothing, r"returning_nothing returns samples of shape \(\) for \(16000,\)"),
    (own.Delay(0, 4000), r"Delay moves speech by 0\.\d+ to 0\.\d+ s.* Set augment\.speech_on: both"),
    (own.Echo, r"is <class '.*Echo'>: expected an object of that class, or its class_path"),
    (lambda samples, _rate, _rng: samples, r"<lambda> cannot be pickled .* Define it in a module"),
    ({"class_path": "nowhere.Echo"}, r"class_path nowhere\.Echo: ModuleNotFoundError: .*PYTHONPATH"),
    ({"class_path": f"{HERE}.Ecko"}, r"Ecko: AttributeError: .*'Ecko'.* Give module\.Class"),
    ({"class_path": "Echo"}, r"class_path Echo: .* Give module\.Class"),
    ({"class_path": f"{HERE}.shorter"}, r"shorter is a function"),
    ({"class_path": "pathlib.Path"}, r"is PosixPath\('\.'\): expected a callable object"),
    ({**ECHO, "init_args": {"gain": 1}}, r"Echo with \{'gain': 1\}: TypeError: .*'gain'"),
    ({**ECHO, "init_args": [1]}, r"expected class_path, and the arguments by name in init_args"),
    ({**ECHO, "args": {}}, r"expected class_path, and the arguments by name in init_args"),
]


@pytest.mark.parametrize(("spec", "message"), MISTAKES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_mistake_is_one_line_before_the_first_batch(
    messy_corpora: MessyCorpora, spec: Any, message: str, inside: bool
) -> None:
    where = r"augment\.speech\[0\](\.OneOf\.transforms\[0\])?"
    with pytest.raises(ConfigError, match=rf"^{where}[. :].*{message}") as raised:
        dataset_of(messy_corpora.speech, {"OneOf": {"transforms": [spec]}} if inside else spec)
    assert "\n" not in str(raised.value)


def test_a_resume_compares_class_and_state_of_own_transforms(messy_corpora: MessyCorpora) -> None:
    def settings(*transforms: Any) -> dict[str, str]:
        augment = AugmentConfig(speech=list(transforms))
        return NestDataModule(DataConfig(messy_corpora.speech, augment=augment)).settings

    before = settings(own.Echo(0.8), ECHO, own.halve_in_place)
    check_unchanged(before, settings(own.Echo(0.8), {**ECHO}, own.halve_in_place), step=1)
    others: list[tuple[Any, ...]] = [
        (own.Echo(0.7), ECHO, own.halve_in_place),
        (own.Echo(0.8), {**ECHO, "init_args": {"level": 0.7}}, own.halve_in_place),
        (own.Echo(0.8), ECHO, own.Echo(0.8)),
        (own.Echo(0.8), ECHO),
    ]
    for other in others:
        with pytest.raises(ConfigError, match=r"data\.augment\.speech: \['Echo \w{16}', \{'class_path'"):
            check_unchanged(before, settings(*other), step=1)

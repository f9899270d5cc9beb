"""Exchanges models with NeMo in `.nemo` files, and compares the outputs of both sides.

    python -m benchmarks run nemo_files --nemo-python PATH

Prints Markdown, and exits with 1 if a difference is too large. NeMo needs a separate virtual environment with
`nemo_toolkit[asr]==3.0.0`. "ours" are random models that are exported here, opened in NeMo with `restore_from`, which
checks names strictly, and saved there with `save_to`. "NeMo's" are initialised and saved by NeMo. Each file that NeMo
saved is opened here, and must hold the settings of the exported file and its weights, bit for bit.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, run_peer
from benchmarks.harness.report import Report
from benchmarks.model.parity import SMALL, VARIANTS
from benchmarks.peers.nemo_model import section
from nestmodel import FeatureConfig, NestConfig, NestNetwork, config_from_nemo, load_network
from nestmodel.formats.nemo_archive import write_nemo

QUICK = None
_BASE = config_from_nemo(section(**SMALL))
OURS: dict[str, NestConfig] = {
    # NeMo's cosine distance raises an error.
    **{name: config_from_nemo(section(**{**SMALL, **v})) for name, v in VARIANTS.items() if "dist_fn" not in v},
    "kernel of 31, subsampling by 4": replace(
        _BASE, encoder=replace(_BASE.conformer, conv_kernel_size=31, subsampling_factor=4)
    ),
    "other features": replace(
        _BASE, features=FeatureConfig(num_mels=128, window_length=401, hop_length=161, preemphasis=0.9, pad_to=8)
    ),
    "18 layers, as the released large one, 192 wide": config_from_nemo(section(d_model=192, n_heads=8, n_layers=18)),
}
NEMOS: dict[str, dict[str, Any]] = {
    "as in NeMo's configuration": section(**SMALL),
    "no biases, no xscaling, two codebooks": section(**SMALL, use_bias=False, xscaling=False, num_books=2),
    "post_conv": section(**SMALL, mask_position="post_conv"),
}
TOLERANCES = {"feats": 1e-4, "encoded": 1e-5, "log_probs": 1e-5}
COLUMNS = ("from", "model", "features", "tokens equal", "encoded", "log-probabilities", "weights back", "settings back")


@dataclass(frozen=True)
class Case:
    """One model and the paths of its files."""

    source: str
    name: str
    model: NestNetwork | None
    """Our model; None if NeMo initialises it."""

    saved: Path
    outputs: Path


def main() -> int:
    """Prints the comparison; returns 1 if a difference exceeds its tolerance."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--nemo-python", required=True, help="Python of an environment with NeMo")
    arguments = parser.parse_args()
    report = Report(
        "Models in NeMo's files",
        __file__,
        "with NeMo 3.0.0, in float32 on a CPU; each model was compared once.",
        results=arguments.results,
    )
    report.text("""\"ours\" are random models that were exported to a `.nemo` file here and opened in NeMo with
        `restore_from`, which checks names strictly; "NeMo's" were initialised and saved by NeMo. Differences are
        between the outputs of both sides for the same audio, over valid frames: absolute for features, relative to the
        largest magnitude of the array otherwise. The last two columns compare the file that NeMo saved, opened here,
        with the original: whether all weights are equal bit for bit, and whether all settings are equal.""")
    are_equal: list[bool] = []
    inputs = _inputs()

    def row(case: Case) -> list[str]:
        is_equal, cells = _compare(case, inputs)
        are_equal.append(is_equal)
        return [case.source, case.name, *cells]

    with tempfile.TemporaryDirectory() as directory:
        report.table(COLUMNS, map(row, _exchange(arguments.nemo_python, Path(directory), inputs)))
    return 0 if all(are_equal) else 1


def _exchange(nemo_python: str, directory: Path, inputs: dict[str, Tensor]) -> Iterator[Case]:
    torch.save(inputs, directory / "inputs")
    cases, jobs = [], []
    for number, (name, source) in enumerate([*OURS.items(), *NEMOS.items()]):
        model, job = None, {"inputs": str(directory / "inputs")}
        if isinstance(source, NestConfig):
            model = NestNetwork(source).eval()
            _perturb(model)
            write_nemo(directory / f"{number}.nemo", source, model.state_dict())
            job["file"] = str(directory / f"{number}.nemo")
        case = Case(
            "ours" if model else "NeMo's", name, model, directory / f"{number}.saved", directory / f"{number}.out"
        )
        cases.append(case)
        job |= {"saved": f"{case.saved}.nemo", "outputs": str(case.outputs)}
        jobs.append(job if model else {**job, "section": source})
    (directory / "cases.json").write_text(json.dumps(jobs))
    run_peer([nemo_python, PEERS / "nemo_files.py", directory / "cases.json"])
    yield from cases


def _compare(case: Case, inputs: dict[str, Tensor]) -> tuple[bool, list[str]]:
    loaded = load_network(f"{case.saved}.nemo").eval()
    # For NeMo's own models, only the outputs can be compared.
    model = case.model or loaded
    theirs, ours = torch.load(case.outputs), _outputs(model, inputs)
    differences = {name: _difference(name, ours, theirs) for name in TOLERANCES}
    # After a causal subsampling with masks before it, there are more encoder frames than tokens.
    lens = theirs["enc_lens"].clamp(max=model.conformer.pre_encode.token_lens(theirs["feat_lens"]))
    is_equal = ours["tokens"] == theirs["tokens"]
    tokens = is_equal[_is_valid(is_equal, lens)].float().mean().item()
    assert torch.equal(ours["enc_lens"], theirs["enc_lens"])
    assert torch.equal(ours["feat_lens"], theirs["feat_lens"])
    same_weights = all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    same_settings = loaded.config == model.config
    row = [
        f"{differences['feats']:.1e}",
        f"{100 * tokens:g} %",
        f"{differences['encoded']:.1e}",
        f"{differences['log_probs']:.1e}",
    ]
    row += ["equal" if same_weights else "DIFFERENT", "equal" if same_settings else "DIFFERENT"]
    if case.model is None:
        row[4:] = ["opened", "opened"]
    within = all(differences[name] < tolerance for name, tolerance in TOLERANCES.items())
    return within and tokens == 1.0 and same_weights and same_settings, row


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    audio_lens = torch.tensor([64000, 50117, 16000])
    audio = 0.1 * torch.randn(3, 64000, generator=generator)
    return {"audio": audio * (torch.arange(64000) < audio_lens.unsqueeze(1)), "audio_lens": audio_lens}


@torch.no_grad()
def _outputs(model: NestNetwork, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    feats, feat_lens = model.features(inputs["audio"], inputs["audio_lens"])
    encoded, enc_lens = model.encoder(feats, feat_lens)
    found = {"feats": feats, "feat_lens": feat_lens, "encoded": encoded, "enc_lens": enc_lens}
    return {**found, "tokens": model.tokens(feats, feat_lens), "log_probs": model.decoder(encoded)}


def _difference(name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    if name == "feats":
        return (ours[name] - theirs[name]).abs().max().item()
    is_valid = _is_valid(theirs["encoded"], theirs["enc_lens"])
    difference = (ours[name] - theirs[name])[is_valid].abs().max()
    return (difference / theirs[name][is_valid].abs().max()).item()


def _is_valid(x: Tensor, lens: Tensor) -> Tensor:
    return torch.arange(x.shape[1]) < lens.unsqueeze(1)


def _perturb(model: NestNetwork) -> None:
    """Changes weights that are initialised to zero or one, so that losing one of them is noticed."""
    generator = torch.Generator().manual_seed(1)
    for value in [*model.encoder.parameters(), *model.encoder.buffers()]:
        if value.ndim < 3 and value.is_floating_point():
            value.data += 0.05 * torch.rand(value.shape, generator=generator)


if __name__ == "__main__":
    sys.exit(main())

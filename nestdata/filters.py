"""The filters of torchaudio that are used: for resampling, and for mel bins. No other module imports torchaudio.

torchaudio cannot be imported if torch was built for another CUDA version, as newer ones are, because of its compiled
functions. None of those is used here, so it is imported as if torch had no CUDA. Lhotse, which imports torchaudio at
the first use, then finds it imported.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_cuda_version = torch.version.cuda
torch.version.cuda = None
try:
    from torchaudio.functional import melscale_fbanks
    from torchaudio.transforms import Resample
finally:
    torch.version.cuda = _cuda_version


def make_resampler(source_rate: int, rate: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that resamples float32 audio, shape (..., num_samples); its filter is computed once.

    Windowed sinc interpolation over 6 zero crossings, with a rolloff of 0.99: torchaudio's defaults. Rates are in Hz.
    """
    resampler: Callable[[Tensor], Tensor] = Resample(source_rate, rate)
    return resampler


def mel_filters(num_mels: int, num_frequencies: int, rate: int) -> Tensor:
    """Returns triangular filters in float32, shape (num_mels, num_frequencies), from 0 Hz to half the rate.

    Bins are equally wide on Slaney's mel scale, and each filter has the same area, as in librosa and NeMo.

    Args:
        num_mels: Number of filters.
        num_frequencies: Frequencies of a spectrum: half the size of the Fourier transform, plus 1.
        rate: Sampling rate of the audio, in Hz.
    """
    with torch.device("cpu"):  # the function does not work on the device "meta"
        filters: Tensor = melscale_fbanks(num_frequencies, 0.0, rate / 2, num_mels, rate, "slaney", "slaney")
    return filters.T.contiguous()

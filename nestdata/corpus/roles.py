"""Warnings about corpora that seem to be given in the wrong role, as noise or for validation.

Warns only of equal content, and of transcripts that only the noise has.
"""

import logging
from functools import cache

from nestdata.corpus.corpora import Corpora, spread_over
from nestdata.corpus.corpus import Corpus

_logger = logging.getLogger(__name__)

_MAX_CUTS_READ = 100
"""Cuts of each corpus that are searched for transcripts; their lines are read, not their audio."""

_LETTERS_PER_SECOND = 8.0
"""Text that is as dense as speech, in letters per second of audio: English has 12 to 16. Captions of sounds and labels,
which noise may have, are shorter."""


def warn_of_noise(speech: Corpora, noise: Corpus) -> None:
    """Warns if the noise is a corpus of the speech, or if the two seem to be swapped."""
    if any(_is_same(corpus, noise) for corpus in speech.corpora):
        _warn(f"{noise.path} is given as speech and as noise: the noise is then speech.")
    elif _is_transcribed(noise) and not any(map(_has_text, speech.corpora)):
        _warn(
            f"{speech.corpora[0].path} and {noise.path} may be swapped: the noise corpus has transcripts, and the "
            "speech corpus has none."
        )


def warn_of_validation(training: Corpora, validation: Corpora) -> None:
    """Warns if the validation corpus is a corpus of the training data."""
    for corpus in validation.corpora:
        if any(_is_same(corpus, trained) for trained in training.corpora):
            _warn(f"{corpus.path} is given for training and for validation: it shows no overfitting.")


def _is_same(one: Corpus, other: Corpus) -> bool:
    """Returns whether two corpora have the same cuts of the same audio."""
    # Fingerprints depend on names and lengths only, so two folders with different audio may have the same one.
    return one.fingerprint == other.fingerprint and all(
        one.line(index)["recording"]["sources"] == other.line(index)["recording"]["sources"]
        for index in (0, len(one) - 1)
    )


@cache
def _warn(message: str) -> None:
    """Logs a warning once: training and validation data have the same noise."""
    _logger.warning(message)


def _has_text(corpus: Corpus) -> bool:
    return any(density > 0 for density in _text_densities(corpus))


def _is_transcribed(corpus: Corpus) -> bool:
    """Returns whether most cuts have a text that is as dense as speech."""
    densities = _text_densities(corpus)
    return 2 * sum(density >= _LETTERS_PER_SECOND for density in densities) > len(densities)


def _text_densities(corpus: Corpus) -> list[float]:
    """Returns the letters of text per second of audio, for cuts spread over the lengths of a corpus."""
    densities = []
    for _, index in spread_over(corpus, min(len(corpus), _MAX_CUTS_READ)):
        texts = [str(part.get("text") or "") for part in corpus.line(index).get("supervisions", [])]
        seconds = int(corpus.num_samples[index]) / corpus.sampling_rate
        densities.append(sum(letter.isalpha() for text in texts for letter in text) / seconds)
    return densities

"""Loads the speech of a microbatch into the rows of one array, with substitutes for cuts that cannot be used."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import nestguard
from nestdata.batch.bad_audio import BadCut
from nestdata.batch.batch import MicrobatchKey
from nestdata.batch.memory import BatchMemory
from nestdata.batch.mix import Speech
from nestdata.batch.remote import RemoteReader
from nestdata.corpus.corpora import Corpora
from nestdata.errors import AudioError
from nestdata.plan.batch_plan import BatchPlan

ShortAudio = Literal["repeat", "pad"]

# Number of cuts of the same bucket that are tried in place of an unusable cut.
_MAX_SUBSTITUTES = 20


class SpeechRows:
    """The speech of one microbatch, one cut in each row.

    Args:
        corpus: The speech.
        plan: The batch plan of the same corpus.
        key: The microbatch.
        short_audio: How cuts shorter than the plan's `min_audio_seconds` are extended.
        memory: Memory for the array, of which nothing may be in use yet.
        remote: Returns the bytes of remote cuts; by default, all audio is read where it is decoded.
    """

    samples: NDArray[np.float32]
    """Shape (cuts, samples), zero after the end of each cut."""

    speech: list[Speech]
    """The cuts of the rows that are loaded."""

    bad_cuts: list[BadCut]
    """Cuts that could not be used."""

    def __init__(
        self,
        corpus: Corpora,
        plan: BatchPlan,
        key: MicrobatchKey,
        *,
        short_audio: ShortAudio,
        memory: BatchMemory,
        remote: RemoteReader | None = None,
    ) -> None:
        self.key = key
        self.speech = []
        self.bad_cuts = []
        self.memory = memory
        self.heartbeat = nestguard.current()
        self._corpus = corpus
        self._plan = plan
        self._short_audio = short_audio
        self._remote = remote
        self._corpus_indices = plan.indices(key.step, key.microbatch).tolist()
        self.samples = memory.empty((len(self), plan.padded_samples(key.step)), np.float32)

    def __len__(self) -> int:
        return len(self._corpus_indices)

    def load_next(self) -> None:
        """Loads the cut of the next row, or a substitute from the same bucket if it cannot be used.

        Raises:
            AudioError: None of the substitutes can be used either.
        """
        row = len(self.speech)
        corpus_index = self._corpus_indices[row]
        for attempt in range(_MAX_SUBSTITUTES + 1):
            num_samples = self._corpus.num_samples_of(corpus_index)
            try:
                cut_id = self._decode(corpus_index, row, num_samples)
            except AudioError as error:
                if self._remote is not None:
                    self._remote.drop(corpus_index)
                self.bad_cuts.append(BadCut.of(self._corpus.line(corpus_index)["id"], error))
                corpus_index = self._plan.substitute(self.key.step, self.key.microbatch, row, attempt)
                continue
            self.speech.append(Speech(corpus_index, cut_id, self._extend(self.samples[row], num_samples)))
            return
        tried = ", ".join(cut.cut_id for cut in self.bad_cuts[-_MAX_SUBSTITUTES - 1 :])
        raise AudioError(
            f"step {self.key.step}, microbatch {self.key.microbatch}: none of {_MAX_SUBSTITUTES + 1} cuts of similar "
            f"length could be used ({tried}); the last: {self.bad_cuts[-1].detail}"
        )

    def _decode(self, corpus_index: int, row: int, num_samples: int) -> str:
        """Decodes a cut to the start of a row and returns its id."""
        options: dict[str, Any] = {"on_cut": self.heartbeat.note_cut}
        if self._remote is not None:
            content = self._remote.speech(corpus_index)
            options |= {"content": content, "is_checked": True, "store": self._remote.storage}
        cut_id, _ = self._corpus.load(corpus_index, out=self.samples[row, :num_samples], **options)
        return cut_id

    def _extend(self, samples: NDArray[np.float32], num_samples: int) -> NDArray[np.float32]:
        """Extends a cut that is too short, writes zeros after its end, and returns its samples."""
        length = max(num_samples, self._plan.min_samples)
        if num_samples < length:
            repeated = self._short_audio == "repeat"
            samples[num_samples:length] = np.resize(samples[:num_samples], length)[num_samples:] if repeated else 0
        samples[length:] = 0
        return samples[:length]

"""Loads the speech of a microbatch into the rows of one array, with substitutes for cuts that cannot be used."""

import numpy as np
from numpy.typing import NDArray

import nestguard
from nestdata.batch.bad_audio import BadCut
from nestdata.batch.mix import Speech
from nestdata.batch.remote import RemoteReader
from nestdata.corpus.corpora import Corpora
from nestdata.corpus.members import UNREAD
from nestdata.errors import AudioError
from nestdata.options import ShortAudio
from nestdata.plan.batch_plan import BatchPlan
from nestdata.plan.microbatch import PlannedMicrobatch

# Number of cuts of the same bucket that are tried in place of an unusable cut.
_MAX_SUBSTITUTES = 20


class SpeechRows:
    """The speech of one microbatch, one cut in each row.

    Args:
        corpus: The speech.
        plan: The batch plan of the same corpus.
        microbatch: The microbatch.
        samples: Memory for the rows, shape (cuts, samples).
        short_audio: How cuts shorter than the plan's `min_audio_seconds` are extended.
        remote: Returns the bytes of remote cuts; by default, all audio is read where it is decoded.
    """

    def __init__(
        self,
        corpus: Corpora,
        plan: BatchPlan,
        microbatch: PlannedMicrobatch,
        samples: NDArray[np.float32],
        *,
        short_audio: ShortAudio,
        remote: RemoteReader | None = None,
    ) -> None:
        self.samples = samples
        self.speech: list[Speech] = []
        """The cuts of the rows that are loaded."""

        self.bad_cuts: list[BadCut] = []
        """Cuts that could not be used."""

        self.heartbeat = nestguard.current()
        self._corpus = corpus
        self._plan = plan
        self._microbatch = microbatch
        self._short_audio = short_audio
        self._remote = remote

    def load_next(self, index: int) -> None:
        """Loads a cut into the next row, or a substitute from the same bucket if it cannot be used.

        Raises:
            AudioError: The cut and all its substitutes cannot be used.
        """
        row = len(self.speech)
        for attempt in range(_MAX_SUBSTITUTES + 1):
            num_samples = self._corpus.num_samples_of(index)
            try:
                cut_id = self._decode(index, row, num_samples)
            except AudioError as error:
                if self._remote is not None:
                    self._remote.drop(index)
                self.bad_cuts.append(BadCut.of(self._corpus.line(index)["id"], error))
                index = self._plan.substitute(self._microbatch, row, attempt)
                continue
            self.speech.append(Speech(index, cut_id, self._extend(self.samples[row], num_samples)))
            return
        tried = ", ".join(cut.cut_id for cut in self.bad_cuts[-_MAX_SUBSTITUTES - 1 :])
        step, microbatch = self._microbatch.key
        raise AudioError(
            f"step {step}, microbatch {microbatch}: none of {_MAX_SUBSTITUTES + 1} cuts of similar length could be "
            f"used ({tried}); the last: {self.bad_cuts[-1].detail}"
        )

    def _decode(self, index: int, row: int, num_samples: int) -> str:
        """Decodes a cut to the start of a row and returns its id."""
        given = UNREAD if self._remote is None else self._remote.speech(index)
        out = self.samples[row, :num_samples]
        cut_id, _ = self._corpus.load(index, out=out, on_cut=self.heartbeat.note_cut, given=given)
        return cut_id

    def _extend(self, samples: NDArray[np.float32], num_samples: int) -> NDArray[np.float32]:
        """Extends a cut that is too short, writes zeros after its end, and returns its samples."""
        length = max(num_samples, self._plan.min_samples)
        if num_samples < length:
            repeated = self._short_audio == "repeat"
            samples[num_samples:length] = np.resize(samples[:num_samples], length)[num_samples:] if repeated else 0
        samples[length:] = 0
        return samples[:length]

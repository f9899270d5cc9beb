"""How much speech was found, for reports. Imports no heavy package."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nestdata.prepare.speech.config import FRAME_SECONDS

if TYPE_CHECKING:
    from nestdata.prepare.speech.measures import SpeechTotals


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechSummary:
    """How much speech the recordings of a corpus have, and how much of them is in cuts."""

    num_recordings: int
    num_without_speech: int
    """Number of recordings without any speech; they are rejected as `no_speech`."""

    hours: float
    """All audio that was searched."""

    speech_hours: float
    cut_hours: float
    """Audio in cuts, with their pauses, before cuts are rejected for other reasons. The rest was left out."""

    num_cuts_in_speech: int
    """Number of places where two cuts meet in running speech, because it lasts longer than a cut may."""

    @classmethod
    def of(cls, totals: "SpeechTotals") -> "SpeechSummary":
        """Converts frames to hours."""
        hours = FRAME_SECONDS / 3600
        return cls(
            num_recordings=totals.num_recordings,
            num_without_speech=totals.num_without_speech,
            hours=totals.frames * hours,
            speech_hours=totals.speech_frames * hours,
            cut_hours=totals.cut_frames * hours,
            num_cuts_in_speech=totals.num_in_speech,
        )

    def text(self) -> str:
        """Returns the summary in one line."""
        left_out = 3600 * (self.hours - self.cut_hours)
        return (
            f"speech in {self.num_recordings - self.num_without_speech} of {self.num_recordings} recordings: "
            f"{self.speech_hours:.2f} of {self.hours:.2f} h; {left_out:.0f} s without speech left out; "
            f"{self.num_cuts_in_speech} cuts in running speech"
        )

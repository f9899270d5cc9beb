"""Settings of `prepare_corpus`. The module imports no heavy package, so that `nestdata prepare --help` starts fast."""

from dataclasses import dataclass
from typing import Literal

from nestdata.audio.channels import NAMED_CHANNELS, Channel
from nestdata.columns import parse_columns
from nestdata.config_checks import require, require_at_least, require_share
from nestdata.errors import ConfigError
from nestdata.field_docs import with_field_docs
from nestdata.input_format import FORMATS, InputFormat

ProbeMode = Literal["missing", "all", "decode"]
_MAX_SAMPLES = 100


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentConfig:
    """How recordings are cut at pauses."""

    min_seconds: float = 5.0
    """Length that cuts should reach, in seconds. Speech is joined across pauses of up to `max_pause` until a cut is at
    least this long. Speech without such a neighbour stays shorter; `PrepareConfig.min_seconds` rejects it."""

    max_seconds: float = 30.0
    """Longest cut, in seconds. Longer speech is cut at its longest pause; speech without a pause, at this length."""

    max_pause: float = 2.0
    """Longest pause inside a cut, in seconds. Longer pauses are left out."""

    padding_seconds: float = 0.3
    """Seconds of audio that a cut has before and after its speech; fewer where the next cut is near."""

    def __post_init__(self) -> None:
        require_at_least(0, "segment", self, "min_seconds", "max_pause", "padding_seconds")
        least = max(1.0, self.min_seconds, 4 * self.padding_seconds)
        require(
            self.max_seconds >= least,
            "segment.max_seconds (--max-segment-seconds)",
            self.max_seconds,
            f"at least {least:g}, the largest of 1, segment.min_seconds (--min-segment-seconds), and 4 times "
            "segment.padding_seconds",
        )


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """Which audio is accepted into a corpus, and the sampling rate at which it is loaded."""

    sampling_rate: int = 16000
    """Sampling rate in Hz at which cuts are loaded.

    Files of another rate are resampled when they are read."""

    channel: Channel | Literal["left", "right"] | None = None
    """Channel to read from every file, whatever a row or a cut names: a number counted from 0, `left`, `right`, or
    `mix` for the average of all.

    None takes the channel that the row or cut names, and the first where none is named."""

    min_seconds: float = 0.1
    """Reject cuts shorter than this many seconds."""

    max_seconds: float | None = None
    """Reject cuts longer than this many seconds.

    None sets no limit."""

    window_seconds: float | None = None
    """Split longer recordings into windows of at most this many seconds.

    The windows are as few as possible, and all of the same length. None keeps recordings whole. With windows,
    `min_seconds` and `max_seconds` apply to each window."""

    segment: SegmentConfig | None = None
    """How recordings are cut at pauses, by voice activity detection; None keeps them whole, or in windows. Text is
    kept only by recordings that are not cut. `min_seconds` applies to each cut."""

    min_speech_share: float | None = None
    """Reject cuts with a lower share of speech, from 0 to 1 (needs the extra `vad`).

    None sets no limit."""

    min_rate: int = 4000
    """Reject files with a lower sampling rate in Hz.

    Speech needs 4 kHz to be understood, and a small file of a much lower rate would be hours of audio."""

    probe: ProbeMode = "all"
    """How to check audio: `missing` reads headers only where the manifest has no duration, `all` reads every header,
    `decode` decodes every file, and finds those that are cut off or damaged, all-zero audio and byte-equal files.

    With `missing`, other durations are trusted, and their files are assumed to have the sampling rate of the corpus."""

    format: InputFormat | None = None
    """Format of every input.

    None detects it."""

    columns: str = ""
    """What columns of tables and keys of lines hold, if their names do not say it: ROLE=NAME,... with the roles audio,
    start, end, duration, channel, text, language and speaker, such as `audio=path,start=begin:ms,end=end:ms`.

    Times are in seconds unless `:ms` or `:samples` follows, or the name itself ends with a unit. `start=` says that no
    column is a start."""

    tars: tuple[str, ...] = ()
    """Tars of NeMo tarred manifests, such as 's3://bucket/audio_{0..511}.tar': one for all inputs, or one for each.

    These are patterns of paths or URLs. Without any, tars are looked for beside the manifests."""

    strict: bool = False
    """Fail if any input would be rejected."""

    pcm: bool = False
    """Also decode all audio into one 16-bit file, which suits noise corpora.

    The file has the rate of the corpus. Noise is read many times."""

    report_samples: int = 10
    """Cuts that can be listened to in the report, drawn at random; 0 for none.

    At most 100. 0 copies no audio and decodes none for the report."""

    def __post_init__(self) -> None:
        require(self.sampling_rate >= 1, "sampling_rate", self.sampling_rate, "a rate in Hz, such as 16000")
        channel, names = self.channel, (None, "mix", *NAMED_CHANNELS)
        is_valid = channel >= 0 if isinstance(channel, int) else channel in names
        require(is_valid, "channel", self.channel, "a channel counted from 0, or mix for the average of all")
        require(self.format in (None, *FORMATS), "format", self.format, f"one of {', '.join(FORMATS)}")
        parse_columns(self.columns)
        require_at_least(0, "", self, "min_seconds", "min_rate")
        require(0 <= self.report_samples <= _MAX_SAMPLES, "report_samples", self.report_samples, f"0 to {_MAX_SAMPLES}")
        if self.max_seconds is not None and self.max_seconds < self.min_seconds:
            raise ConfigError(
                f"max_seconds ({self.max_seconds:g}) is below min_seconds ({self.min_seconds:g}): no cut would be left."
            )
        if self.window_seconds is not None and self.window_seconds < max(self.min_seconds, 1 / self.sampling_rate):
            raise ConfigError(
                f"window_seconds ({self.window_seconds:g}) is below min_seconds ({self.min_seconds:g}): "
                "every window would be rejected."
            )
        self._check_speech()

    @property
    def chosen_channel(self) -> Channel | None:
        """The channel that the caller asks for, as a number or "mix"; None for the channel that the input names."""
        return NAMED_CHANNELS.get(self.channel, "mix") if isinstance(self.channel, str) else self.channel

    @property
    def finds_speech(self) -> bool:
        """Whether a detector looks for speech, which decodes all audio."""
        return self.segment is not None or self.min_speech_share is not None

    def _check_speech(self) -> None:
        if self.min_speech_share is not None:
            require_share("", self, "min_speech_share")
        if self.finds_speech and self.probe == "missing":
            raise ConfigError(
                "probe is 'missing', which trusts the durations in manifests, but finding speech decodes all audio: "
                "leave out --probe, or --segment and --min-speech-share."
            )
        if self.segment is None:
            return
        if self.window_seconds is not None:
            raise ConfigError(
                "segment and window_seconds exclude each other: cut either at pauses or into windows of one length."
            )
        if self.max_seconds is not None and self.max_seconds < self.segment.max_seconds:
            raise ConfigError(
                f"max_seconds ({self.max_seconds:g}) is below segment.max_seconds ({self.segment.max_seconds:g}): "
                "longer segments would be rejected. Lower segment.max_seconds (--max-segment-seconds) instead."
            )
        if self.min_seconds > self.segment.max_seconds:
            raise ConfigError(
                f"min_seconds ({self.min_seconds:g}) is above segment.max_seconds ({self.segment.max_seconds:g}): "
                "every segment would be rejected."
            )

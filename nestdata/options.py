"""Closed choices of settings, which commands read without importing torch."""

from typing import Literal

ShortAudio = Literal["repeat", "pad"]
"""How a cut that is too short is lengthened: its audio again, or silence."""

StartMethod = Literal["fork", "forkserver", "spawn"]
"""How loader processes are started; see Python's `multiprocessing`."""

PackCodec = Literal["flac", "wav"]
"""Format of packed audio files, both with 16 bits per sample."""

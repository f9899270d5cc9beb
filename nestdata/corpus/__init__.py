"""Prepared corpora: cuts on disk, their audio, and the sample bank."""

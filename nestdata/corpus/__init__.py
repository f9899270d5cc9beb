"""Prepared corpora on disk: cuts, their audio, and the sample bank."""

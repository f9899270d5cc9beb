"""Packing of corpora into Lhotse Shar, and checks of the audio that a corpus names."""

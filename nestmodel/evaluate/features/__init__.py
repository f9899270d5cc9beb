"""Encoder features of audio: of corpora and other inputs, of single files and arrays, and as files on disk."""

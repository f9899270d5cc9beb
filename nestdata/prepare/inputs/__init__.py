"""Inputs: audio files, folders, lists and tables of them, and the manifests and data sets of other projects.

Here is what the formats share; `formats` has one file for each, and `formats.detect.open_sources`, which detects the
format of each input and opens it as a source of entries. A manifest that cannot be parsed is an error that stops the
run; `nestdata.prepare.run.probe` decides whether the audio of an entry is usable.
"""

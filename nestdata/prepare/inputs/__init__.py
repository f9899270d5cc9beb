"""Inputs: audio files, folders, lists and tables of them, and the manifests and data sets of other projects.

Here is what the formats share, and `format.open_sources`, which detects the format of each input and opens it as a
source of entries; `formats` has the readers, and `nestdata.input_format` lists them. A manifest that cannot be parsed
is an error that stops the run; `nestdata.prepare.run.probe` decides whether the audio of an entry is usable.
"""

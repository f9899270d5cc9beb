"""Prepares a corpus directory from manifests, data sets or folders of audio."""

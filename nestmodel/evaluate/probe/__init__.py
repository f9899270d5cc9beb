"""The tasks of `nestmodel probe`: labels of utterances, characters by CTC."""

"""Where speech is in long recordings: frame probabilities, cuts at pauses, level and signal-to-noise ratio."""

"""Races the forms of the parts of a training step on the device of a run, and keeps the results."""

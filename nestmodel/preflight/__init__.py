"""Checks of ranks, disks, audio, memory and network before a run."""

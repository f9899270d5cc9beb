"""Lightning callbacks that monitor, log and end a run."""

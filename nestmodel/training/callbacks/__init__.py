"""Lightning callbacks that monitor and log a run."""

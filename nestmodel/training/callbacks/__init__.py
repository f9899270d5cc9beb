"""Lightning callbacks that watch a run."""

"""Five checks before a run (step, shards, audio, disk, ranks), and the search for a batch budget."""

"""Whether the steps of a run fit into memory: their check, and the largest batch budget that fits."""

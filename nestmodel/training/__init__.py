"""Training with Lightning: module, data module, checkpoints, resuming, and preemption."""

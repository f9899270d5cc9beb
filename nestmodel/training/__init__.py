"""Training with Lightning: the module, the data module, checkpoints, resume and preemption."""

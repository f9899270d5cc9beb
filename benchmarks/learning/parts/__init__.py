"""What benchmarks of learning share: manifests, hidden names, pretraining, and probes with their tables."""

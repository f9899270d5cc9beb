"""`python -m benchmarks.gpu`: measures on a GPU what cannot be decided without one. See docs/gpu.md."""

"""Encoder features, and what measures them: error rates and probes."""

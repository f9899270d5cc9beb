"""Encoder features and what measures them: probes, error rates, acoustic units, scores without labels."""

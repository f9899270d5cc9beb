"""Encoder features, and probes of labels, content and single frames."""

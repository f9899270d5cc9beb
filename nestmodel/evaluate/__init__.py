"""Encoder features and the linear probe."""

"""Checkpoints: written, kept, and resumed from."""

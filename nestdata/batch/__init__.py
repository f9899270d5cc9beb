"""Microbatches of clean and noisy audio: loading, mixing, augmentation and preview."""

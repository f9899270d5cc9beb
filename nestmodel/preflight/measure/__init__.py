"""Figures of devices, loaders, stores and all-reduces; only errors say what to do."""

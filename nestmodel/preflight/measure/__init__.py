"""Measures devices, loaders, stores and sums over ranks; gives no advice."""

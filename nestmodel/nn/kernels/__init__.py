"""Kernels in Triton for a GPU, each beside the module with the definition of what it computes."""

"""Code for GPUs only: casts of all weights at once, and kernels in Triton.

The modules beside this package define what is computed, on any device. The encoder is built from layers of this package
(`Accelerated...`), each with the parameters of the layer that it derives from. On a GPU they compute in a way of their
own, otherwise as that layer does: the subsampling by the device of its input, blocks by the type of the description of
their frames. `check` compares both on the GPU of a run; tests compare each kernel with operations of PyTorch.
"""

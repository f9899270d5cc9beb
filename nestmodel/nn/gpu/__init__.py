"""Code for GPUs only: casts of all weights at once, fused attention, kernels in Triton.

The modules beside this package define what is computed, on any device. The encoder is built from layers of this package
(`Accelerated...`), each with the parameters of the layer that it derives from. On a GPU they compute in a form of their
own, otherwise as that layer does: subsampling and dropout by the device of their input, blocks by the type of the
description of their frames. Tests compare both forms, and each kernel with a form in PyTorch. `forms` names what a run
takes of this package.
"""

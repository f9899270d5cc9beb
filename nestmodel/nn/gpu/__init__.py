"""What only a GPU needs: casts of all weights at once, fused attention, kernels in Triton, steps as CUDA graphs.

The modules beside this room define what is computed, on any device. The encoder is built from layers of this room
(`Accelerated...`): each has the parameters of the layer that it derives from, computes in a form for GPUs if its input
is on one, and calls the method of that layer otherwise. Tests compare both forms, and each kernel with a form in
PyTorch. `kernel_choice` names the forms that a run can choose from.
"""

"""What only a GPU needs: casts of all weights at once, fused attention, kernels in Triton, steps as CUDA graphs.

The modules beside this room define what is computed. Each kernel stands beside a form in PyTorch that tests compare it
with. `kernel_choice` names the forms that a run can choose from.
"""

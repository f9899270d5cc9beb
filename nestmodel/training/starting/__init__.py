"""What happens before the first step: checks, ranks, kernels, the summary of the run."""

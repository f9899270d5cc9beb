"""What happens before the first step: checks, ranks, the deterministic mode, the summary of the run."""

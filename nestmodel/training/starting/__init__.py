"""What happens before the first step: checks, and the summary of the run."""

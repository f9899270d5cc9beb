"""A run that is built: its checks, and what it prints before and after training."""

"""From a microbatch index to clean and noisy audio."""

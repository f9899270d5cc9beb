"""The monitors of several nodes: what they send each other, and how they prove that they belong to the run."""

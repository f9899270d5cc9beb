"""Why and how a run ends early: preemption, Ctrl-C, and the decision that all ranks share."""

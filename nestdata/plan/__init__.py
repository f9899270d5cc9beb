"""The batch plan: which cuts are in which microbatch of which optimizer step."""

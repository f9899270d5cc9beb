"""Which cuts are in which microbatch of which optimizer step."""

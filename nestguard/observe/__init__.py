"""What a process does, as it writes it down, and as the monitor of its node sees it."""

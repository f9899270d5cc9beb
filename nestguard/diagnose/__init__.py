"""Names the processes that hold up the others: pure functions of what the monitors know."""

"""Which process holds up the others: pure functions of what the monitors see."""

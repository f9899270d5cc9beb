"""Finds the largest batch budget that fits into the memory of a rank, by trials in processes of their own."""

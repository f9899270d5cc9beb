"""A run before its first step: what is built, its checks, its summary."""

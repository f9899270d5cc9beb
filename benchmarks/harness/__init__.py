"""What all benchmarks share: arguments, rounds, processes, and the Markdown of a result."""

"""Fuzzers of everything that is parsed from outside.

A target takes one input, and either accepts it or refuses it with an error of this project. Everything else is a crash:
another exception, 5 s of CPU time, or 500 MB of memory. `make test` tries some inputs of each target, always the same;
`python -m tests.fuzz --minutes 30` tries others for as long as one likes, and counts them.
"""

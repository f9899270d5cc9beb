"""Decoding of audio: files and bytes in any format become samples at one rate, with every check on the way."""

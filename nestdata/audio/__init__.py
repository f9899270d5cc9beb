"""Decodes audio files and bytes to samples at one rate, and checks them."""

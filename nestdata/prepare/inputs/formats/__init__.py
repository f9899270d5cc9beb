"""Input formats, one file each, and the order in which they are detected."""

"""The HTML report of a corpus, and the audio in it."""

"""The files of a corpus: cuts, rejects, records, index, addresses."""

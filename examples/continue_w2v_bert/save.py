"""Saves the encoder of a checkpoint as transformers saves it, for `AutoModel.from_pretrained`."""

import argparse
from pathlib import Path

from nestmodel import load_network


def main(arguments: list[str] | None = None) -> Path:
    """Returns the folder that was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="of nestmodel fit")
    parser.add_argument("output", type=Path, help="folder to write")
    options = parser.parse_args(arguments)
    load_network(options.checkpoint).encoder.model.save_pretrained(options.output)
    return options.output


if __name__ == "__main__":
    main()

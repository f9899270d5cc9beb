"""Finds the cuts of an entry: reads it, divides it into parts, and judges each of them.

Each of the three is a module of its own. A task collects what they find with `writing.item_collector`.
"""

from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.divide import divide
from nestdata.prepare.inputs.entry import Entry
from nestdata.prepare.judge import judge
from nestdata.prepare.read import read_entry
from nestdata.prepare.speech.measures import SpeechTotals
from nestdata.prepare.writing.found import Cut, Reject


def probe(entry: Entry, config: PrepareConfig) -> list[Cut | Reject | SpeechTotals]:
    """Returns the cut of an entry, or its windows or segments, at the rate of the corpus; unusable ones are a `Reject`.

    With `config.probe` "missing", a file is opened only if the manifest gives no duration; "all" reads the header of
    every file; "decode" decodes every cut. If speech is looked for, the result says how much there is.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    whole = read_entry(entry, config)
    if isinstance(whole, Reject):
        return [whole]
    return judge(whole, divide(whole, config), config)

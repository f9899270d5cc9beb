from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from nestdata import Address
from nestdata.corpus.addresses import NO_SHARD, AddressTable
from nestdata.prepare.corpus_writer import CorpusStats, CorpusWriter
from nestdata.prepare.found import Collector, Cut, Found
from nestdata.prepare.inputs.entry import Entry, Member, Unusable
from nestdata.prepare.inputs.lines import LineSource, Manifest
from nestdata.storage import ObjectInfo
from tests.synthesis import read_jsonl


class Item(NamedTuple):
    """The properties of a cut that matter to the writer."""

    cut_id: str
    num_samples: int = 16000
    language: str | None = None
    is_resampled: bool = False
    shard: str = ""
    """Location of the shard; empty for a cut without an address."""

    offset: int = 0


class NamedSource(LineSource):
    """Stands in for a source."""

    format = "list"

    def __init__(self, name: str) -> None:
        self.manifest = Manifest(name, False)

    def entries(self, number: int, item: object) -> Iterator[Entry]:
        raise NotImplementedError


_FROM_8K = [{"name": "Resample", "kwargs": {"source_sampling_rate": 8000, "target_sampling_rate": 16000}}]


def row_of(item: Item) -> dict[str, Any]:
    label = {"id": item.cut_id} | ({"language": item.language} if item.language else {})
    return {
        "id": item.cut_id,
        "start": 0.0,
        "duration": item.num_samples / 16000,
        "channel": 0,
        "supervisions": [label],
        "recording": {"id": item.cut_id, "sampling_rate": 16000}
        | ({"transforms": _FROM_8K} if item.is_resampled else {})
        | {"duration": item.num_samples / 16000},
    }


def collect(items: Sequence[Item], first: int = 1) -> Found:
    collector = Collector()
    for number, item in enumerate(items, start=first):
        rate = 8000 if item.is_resampled else 16000
        cut = Cut(row_of(item), item.num_samples, rate, member_of(item))
        collector.add([cut], number, Entry(f"m:{number}", item.cut_id, NO_AUDIO))
    return collector.collected()


def member_of(item: Item) -> Member | None:
    """Returns a member that is as long as the cut has samples, whose checksum is its offset."""
    if not item.shard:
        return None
    info = ObjectInfo(item.shard, 10**12, f"tag of {item.shard}")
    return Member(info, item.offset, item.num_samples, crc32=item.offset & 0xFFFFFFFF)


def addresses_of(directory: Path, stats: CorpusStats) -> list[Address | None]:
    """Returns the addresses in the order of the index."""
    assert stats.shards is not None
    meta = {"num_cuts": stats.num_cuts, "root": stats.shards["root"], "shards": stats.shards}
    table = AddressTable.open(directory, meta)
    assert table is not None
    return [table[index] for index in range(stats.num_cuts)]


def write(directory: Path, items: Sequence[Item], part: int = 1000) -> CorpusStats | None:
    """Writes items, collected in parts of this size."""
    directory.mkdir(exist_ok=True)
    with closing(CorpusWriter(directory)) as writer:
        for first in range(0, len(items), part):
            writer.add(collect(items[first : first + part], first + 1), 0)
        return writer.finish([NamedSource("m")], 16000)


def contents(written: CorpusStats | None) -> tuple[Any, ...] | None:
    """Returns all statistics that must be equal for two corpora with the same cuts."""
    if written is None:
        return None
    return (
        *(written.num_cuts, written.num_bytes, written.lengths.tolist(), written.samples_by_rate),
        *(written.fingerprint, written.num_resampled, dict(written.samples_by_language)),
    )


ITEMS = st.builds(
    Item,
    cut_id=st.sampled_from(["a", "b", "c", "d", "ü"]),
    num_samples=st.integers(1, 9),
    language=st.sampled_from([None, "en", "de"]),
    is_resampled=st.booleans(),
    shard=st.just(""),
    offset=st.just(0),
)


@given(items=st.lists(ITEMS, max_size=30), part=st.integers(1, 40))
@example(items=[Item("a"), Item("a", 5), Item("b")], part=9)  # the first cut
@example(items=[Item("b"), Item("a"), Item("a", 5)], part=9)  # the last cut
@example(items=[Item("a", i) for i in range(1, 8)], part=2)  # all cuts
@example(items=[Item(c, i + 1, "de") for i, c in enumerate("aabbbbcadadcde")], part=5)  # runs of repeated ids
@example(items=[Item(c, i + 1, "de") for i, c in enumerate("abcdefghi" * 2)], part=5)  # a manifest twice
def test_a_corpus_with_duplicates_equals_the_corpus_without_them(items: list[Item], part: int) -> None:
    kept, repeated = {}, []
    for number, item in enumerate(items, start=1):
        if item.cut_id in kept:
            repeated.append((f"m:{number}", item.cut_id, "duplicate_id"))
        else:
            kept[item.cut_id] = item
    with TemporaryDirectory() as directory:
        first, second = Path(directory, "first"), Path(directory, "second")
        written, expected = write(first, items, part), write(second, list(kept.values()))
        assert contents(written) == contents(expected)
        for name in ("cuts.jsonl", "index.npy") if items else ():
            assert (first / name).read_bytes() == (second / name).read_bytes()
        assert [(r["where"], r["cut_id"], r["reason"]) for r in read_jsonl(first / "rejected.jsonl")] == repeated
        assert not written or written.rejected == ({"duplicate_id": len(repeated)} if repeated else {})


def test_a_duplicate_names_its_source_and_position(tmp_path: Path) -> None:
    with closing(CorpusWriter(tmp_path)) as writer:
        writer.add(collect([Item("a"), Item("b")]), 0)
        writer.add(collect([Item("c"), Item("b")], first=41), 1)
        writer.finish([NamedSource("first"), NamedSource("second")], 16000)
        assert writer.first_reject is not None
        assert writer.first_reject[:3] == ("second:42", "b", "duplicate_id")
        assert "'b' is taken by" in writer.first_reject.detail
        assert "(first:2)" in writer.first_reject.detail


LOCATED = st.builds(
    Item,
    cut_id=st.sampled_from("abcdefgh"),
    num_samples=st.integers(1, 9),
    shard=st.sampled_from(["", "s3://b/x/1.tar", "s3://b/x/2.tar", "s3://b/y/3.tar"]),
    offset=st.integers(0, 2**39),
)


@given(items=st.lists(LOCATED, max_size=25), part=st.integers(1, 30))
@example(items=[Item("a", shard="s3://b/1.tar"), Item("a", 5), Item("b", 2, shard="s3://b/2.tar")], part=9)
def test_every_cut_keeps_its_own_address(items: list[Item], part: int) -> None:
    first = {item.cut_id: item for item in reversed(items)}
    expected = [item for item in items if first[item.cut_id] is item]
    with TemporaryDirectory() as directory:
        written = write(Path(directory), items, part)
        if not any(item.shard for item in items):
            assert sorted(path.name for path in Path(directory).glob("*s.*")) == ["cuts.jsonl"]
            return
        assert written is not None
        found = addresses_of(Path(directory), written)
    for item, address in zip(sorted(expected, key=lambda item: item.num_samples), found, strict=True):
        values = (item.shard, item.offset, item.num_samples, 10**12, f"tag of {item.shard}", item.offset & 0xFFFFFFFF)
        assert address == (values if item.shard else None)


def test_shards_are_numbered_in_the_order_of_first_use_and_named_below_their_common_folder(tmp_path: Path) -> None:
    places = ["/data/b/2.tar", "/data/a/1.tar", "/data/b/2.tar", "", "/data/b/c/3.tar"]
    items = [Item(str(i), 5 + i, shard=place) for i, place in enumerate(places)]
    written = write(tmp_path, [*items, items[1]], part=2)
    assert written is not None
    assert written.shards == {"num_shards": 3, "root": "/data", "has_urls": False, "has_checksums": True}
    rows = read_jsonl(tmp_path / "shards.jsonl")
    assert [(row["name"], row["members"]) for row in rows] == [("b/2.tar", 2), ("a/1.tar", 1), ("b/c/3.tar", 1)]
    assert rows[0] == {"name": "b/2.tar", "size": 10**12, "etag": "tag of /data/b/2.tar", "members": 2}
    addresses = np.load(tmp_path / "addresses.npy")
    assert addresses["shard"].tolist() == [0, 1, 0, NO_SHARD, 2]
    assert addresses["length"].tolist() == [5, 6, 7, 0, 9]


NO_AUDIO = Unusable("missing", "")

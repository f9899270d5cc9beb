"""The order of the cuts in a packed set, and their division into shards; both are functions of corpora and settings."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.corpora import Corpora
from nestdata.errors import ConfigError
from nestdata.stateless_rng import Permutation, derive_key

# Bytes of a cut besides its samples: two tar headers, the recording as JSON, and padding.
_BYTES_PER_CUT = 2300
# Positions that are processed at a time.
_BLOCK = 1 << 20
_MAX_SHARDS = 1_000_000


class ShardCuts(NamedTuple):
    """The cuts of one shard in its order, arrays of shape (num_cuts,)."""

    indices: NDArray[np.int64]
    """Index of each cut in the corpora."""

    numbers: NDArray[np.int64]
    """Position of each cut in the order of the input: all cuts of the first corpus, then those of the next one."""


class PackingOrder:
    """A keyed permutation of all cuts. Takes 8 bytes of memory per cut.

    Args:
        corpora: The corpora to pack.
        seed: Seed of the permutation.
    """

    def __init__(self, corpora: Corpora, seed: int) -> None:
        self._by_number = corpora.input_order()
        self._num_samples = corpora.num_samples
        self._first_indices = np.cumsum([0, *map(len, self._num_samples)])
        self._permutation = Permutation(len(corpora), derive_key(seed, "pack"))

    def cuts(self, start: int, stop: int) -> ShardCuts:
        """Returns the cuts at the positions [start, stop)."""
        numbers = self._permutation(np.arange(start, stop))
        return ShardCuts(self._by_number[numbers], numbers)

    def shard_bounds(self, shard_bytes: int, bytes_per_1000_samples: int) -> list[int]:
        """Divides the positions into shards of about equal size in bytes.

        Args:
            shard_bytes: Size of a shard. As many shards are made as this size suggests, at least one.
            bytes_per_1000_samples: Estimated size of encoded audio.

        Returns:
            The first position of every shard, and the number of cuts at the end.

        Raises:
            ConfigError: There would be more shards than names for them.
        """
        num_cuts = len(self._by_number)
        total_samples = sum(int(lengths.sum()) for lengths in self._num_samples)
        total = num_cuts * _BYTES_PER_CUT * 1000 + total_samples * bytes_per_1000_samples
        num_shards = max(1, round(total / (1000 * shard_bytes)))
        if num_shards > _MAX_SHARDS:
            raise ConfigError(
                f"shard_bytes is {shard_bytes}: this makes {num_shards} shards, at most 1,000,000 can be."
            )
        bounds, before, last_shard = [0], 0, 0
        for start, lengths in self._blocks(num_cuts):
            sizes = _BYTES_PER_CUT * 1000 + lengths * bytes_per_1000_samples
            ends = before + np.cumsum(sizes)
            # In thousandths of a byte, divided first: the product with the number of shards would exceed 64 bits.
            shards = (ends - sizes) // -(-total // num_shards)
            previous = np.concatenate([[last_shard], shards[:-1]])
            bounds.extend((start + np.flatnonzero(shards != previous)).tolist())
            before, last_shard = int(ends[-1]), int(shards[-1])
        return [*bounds, num_cuts]

    def _blocks(self, num_cuts: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yields blocks of positions: the first position, and the length of each cut in samples."""
        for start in range(0, num_cuts, _BLOCK):
            indices = self.cuts(start, min(start + _BLOCK, num_cuts)).indices
            lengths = np.empty(len(indices), np.int64)
            corpus = np.searchsorted(self._first_indices, indices, side="right") - 1
            for number, own_lengths in enumerate(self._num_samples):
                is_own = corpus == number
                lengths[is_own] = own_lengths[indices[is_own] - self._first_indices[number]]
            yield start, lengths

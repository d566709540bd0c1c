"""Observations in blocks of rows, of which a pass over all has one in memory at a time.

For observations that do not fit in memory, or lie on other machines: what a fit needs of them are
sums over blocks of statistics that add, and random rows. dask is imported where its collections are
given, and nowhere else.
"""

import math
import numbers
import operator
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from skgp.data import Data
from skgp.linalg.runtime import WithinBudget, one_thread

Progress = Callable[[int, dict], bool | None]


class Blocks(Protocol):
    """Observations that a fit passes over block by block, wherever they lie."""

    @property
    def n_columns(self) -> int:
        """Number of columns of X."""

    def __len__(self) -> int:
        """Number of rows."""

    def sum(self, statistic: Callable[[Data], Any], callback: Progress | None = None) -> Any:
        """Sum of an additive statistic of every block, anything with ``+``.

        Neighbouring blocks are added first, then pairs of pairs, so that the sum has the same
        rounding whoever works it out. `callback` is told of the rows read. The sum is of all blocks
        whatever it returns: that of some is no statistic of the observations. What raises, raises.
        """

    def take(self, index: np.ndarray) -> Data:
        """The observations of rising row numbers (k,), without those of weight 0."""

    def by_rows(self) -> "ArrayBlocks":
        """The same observations, of which rows are to be read at random, many times."""

    def labels(self, distinct: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
        """What `distinct` finds in the targets of positive weight of each block."""

    def coded(self, code: Callable[[Any], np.ndarray]) -> "Blocks":
        """The same with the whole numbers that `code` makes of the targets."""


def some_numbers(n: int, size: int, generator: torch.Generator) -> np.ndarray:
    """At most `size` rising numbers below n at random, without a permutation of all n."""
    if n <= size:
        return np.arange(n)
    drawn = torch.randint(2**31 - 1, (1,), generator=generator, device=generator.device)
    rng = np.random.default_rng(int(drawn))
    return np.sort(rng.choice(n, size, replace=False, shuffle=False))


_MISSING = (
    "; or give a series that fits in memory to StateSpaceGPRegressor as arrays (of dask's: "
    "y.compute()) with a larger memory_budget: there it takes NaN for what was not observed."
)


def observations(first_row: int, X: Any, y: Any, weight: Any = None) -> Data:
    """Rows of a block in float64, without those of weight 0; in memory, on the CPU.

    ValueError names the first of them that holds NaN or an infinite number, or a negative weight.
    """
    columns = [np.array(X, np.float64, ndmin=2), np.array(y, np.float64).reshape(-1)]
    if weight is not None:
        columns.append(np.array(np.broadcast_to(weight, len(columns[1])), np.float64))
    for name, column in zip(("X", "y", "sample_weight"), columns, strict=False):
        good = np.isfinite(column) & ((column >= 0) | (name != "sample_weight"))
        if not good.all():
            row = int(good.reshape(len(column), -1).all(1).argmin())
            raise ValueError(
                f"{name} must hold finite numbers, and weights none below 0; got "
                f"{column[row].tolist()} in row {first_row + row}. Drop such rows"
                + (_MISSING if name == "y" and np.isnan(column[row]) else ".")
            )
    if weight is not None:
        kept = columns[2] > 0
        columns = columns if kept.all() else [column[kept] for column in columns]
    return Data(*map(torch.from_numpy, columns))


def sum_of_neighbors(parts: Iterable[Any], add: Callable[[Any, Any], Any] = operator.add) -> Any:
    """Sum in a balanced tree over parts (at least 1) in their order; holds log2 of them."""
    sums: list[tuple[int, Any]] = []
    for part in parts:
        size = 1
        while sums and sums[-1][0] == size:
            size, part = 2 * size, add(sums.pop()[1], part)
        sums.append((size, part))
    total = sums.pop()[1]
    while sums:
        total = add(sums.pop()[1], total)
    return total


@dataclass(frozen=True)
class ArrayBlocks:
    """Slices of arrays or memory maps, read one after the other."""

    X: np.ndarray  # (n, d), of any dtype of real numbers
    y: np.ndarray  # (n,)
    weight: np.ndarray | None
    n_rows: int  # of a block

    def __len__(self) -> int:
        return len(self.y)

    n_columns = property(lambda self: self.X.shape[1])

    def sum(self, statistic: Callable[[Data], Any], callback: Progress | None = None) -> Any:
        """See `Blocks`."""
        return sum_of_neighbors(self._statistics(statistic, callback))

    def _statistics(self, statistic, callback) -> Iterator[Any]:
        for number, rows in enumerate(self._slices(), 1):
            yield statistic(self._read(rows, rows.start))
            if callback:
                callback(number, {"rows": min(rows.stop, len(self))})

    def take(self, index: np.ndarray) -> Data:
        """See `Blocks`."""
        return self._read(index)

    def by_rows(self) -> "ArrayBlocks":
        """See `Blocks`: as they are."""
        return self

    def labels(self, distinct: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
        """See `Blocks`."""
        return [
            distinct(_weighted(self.y[rows], None if self.weight is None else self.weight[rows]))
            for rows in self._slices()
        ]

    def coded(self, code: Callable[[Any], np.ndarray]) -> "ArrayBlocks":
        """See `Blocks`; the numbers are held in memory."""
        return replace(self, y=np.concatenate([code(self.y[rows]) for rows in self._slices()]))

    def _slices(self) -> Iterator[slice]:
        for start in range(0, len(self), self.n_rows):
            yield slice(start, start + self.n_rows)

    def _read(self, rows: slice | np.ndarray, first_row: int = 0) -> Data:
        weight = None if self.weight is None else self.weight[rows]
        return observations(first_row, self.X[rows], self.y[rows], weight)


@dataclass(frozen=True)
class DaskBlocks:
    """Chunks of dask arrays or partitions of data frames: statistics are made where these lie."""

    parts: list[tuple]  # X, y, weight (or None) of each, delayed
    lengths: list[int]  # rows of each
    n_columns: int

    @staticmethod
    def of(X: Any, y: Any, weight: Any = None) -> "DaskBlocks":
        """Blocks of a dask array or data frame X, with y and weights that lie anywhere.

        Lengths that are not known are counted, in one pass. A number is the weight of every row.
        ValueError unless y and weights have as many rows as X.
        """
        rows, lengths = dask_rows(X)
        one = isinstance(weight, numbers.Number)
        weights = [weight] * len(rows) if one else aligned(weight, lengths, "sample_weight")
        columns = [rows, aligned(y, lengths, "y"), weights]
        kept = [i for i, length in enumerate(lengths) if length]
        parts = [tuple(column[i] for column in columns) for i in kept]
        return DaskBlocks(parts, [lengths[i] for i in kept], int(X.shape[1]))

    def __len__(self) -> int:
        return sum(self.lengths)

    def sum(self, statistic: Callable[[Data], Any], callback: Progress | None = None) -> Any:
        """See `Blocks`; `callback` is called at the end."""
        import dask

        shared, add = (
            dask.delayed(WithinBudget(statistic), traverse=False),
            dask.delayed(operator.add),
        )
        found = [
            dask.delayed(_statistic)(shared, first, *part)
            for first, part in zip(self._firsts(), self.parts, strict=True)
        ]
        total = sum_of_neighbors(found, add).compute()
        if callback:
            callback(len(self.parts), {"rows": len(self)})
        return total

    def take(self, index: np.ndarray) -> Data:
        """See `Blocks`."""
        import dask

        cuts = np.searchsorted(index, self._firsts()[1:])
        found = dask.compute(
            *(
                dask.delayed(_rows_of)(rows - first, first, *part)
                for rows, first, part in zip(
                    np.split(index, cuts), self._firsts(), self.parts, strict=True
                )
                if len(rows)
            )
        )
        weights = [data.weight for data in found if data.weight is not None]
        X, y = torch.cat([data.X for data in found]), torch.cat([data.y for data in found])
        return Data(X, y, torch.cat(weights) if weights else None)

    def by_rows(self) -> ArrayBlocks:
        """See `Blocks`: maps of a temporary file, written block by block."""
        import dask

        d, weighted = self.n_columns, self.parts[0][2] is not None
        with tempfile.TemporaryFile() as file:
            table = np.memmap(file, np.float64, "w+", shape=(len(self), d + 1 + weighted))
        for first, length, part in zip(self._firsts(), self.lengths, self.parts, strict=True):
            X, y, weight = dask.compute(*part)
            rows = slice(first, first + length)
            table[rows, :d], table[rows, d] = X, np.asarray(y).reshape(-1)
            if weighted:
                table[rows, d + 1] = weight
        weight = table[:, d + 1] if weighted else None
        return ArrayBlocks(table[:, :d], table[:, d], weight, max(self.lengths))

    def labels(self, distinct: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
        """See `Blocks`."""
        import dask

        found = dask.delayed(_labels_of)
        return list(dask.compute(*(found(distinct, y, weight) for _, y, weight in self.parts)))

    def coded(self, code: Callable[[Any], np.ndarray]) -> "DaskBlocks":
        """See `Blocks`; the numbers are made where the blocks lie."""
        import dask

        made = dask.delayed(code, traverse=False)
        return replace(self, parts=[(X, made(y), weight) for X, y, weight in self.parts])

    def _firsts(self) -> list[int]:
        """Number of the first row of each part."""
        return [int(first) for first in np.cumsum([0, *self.lengths[:-1]])]


@dataclass(frozen=True)
class RowReader:
    """An array or map of which rows are read by number, all but some."""

    array: np.ndarray  # (n, ...)
    left_out: np.ndarray  # rising numbers (k,) of rows that do not count
    function: Callable[[np.ndarray], np.ndarray] = np.asarray  # of the rows read

    device = "cpu"

    def __len__(self) -> int:
        return len(self.array) - len(self.left_out)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        before = self.left_out - np.arange(len(self.left_out))
        return self.function(self.array[rows + np.searchsorted(before, rows, side="right")])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what all rows would be."""
        return len(self), *self.function(self.array[:1]).shape[1:]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True)
class MappedBlocks:
    """Blocks of which the observations pass through a function as they are read."""

    blocks: Blocks
    function: Callable[[Data], Data]  # for other processes to import, where the blocks lie there
    total: float  # of the weights of all observations
    some: Data  # at random, or all if they are few; as the function returns them

    def __len__(self) -> int:
        return len(self.blocks)

    def then(self, function: Callable[[Data], Data], some: Data) -> "MappedBlocks":
        """The observations as a further function returns them."""
        return replace(self, function=partial(_chained, self.function, function), some=some)

    def sum(self, statistic: Callable[[Data], Any], callback: Progress | None = None) -> Any:
        """See `Blocks`."""
        return self.blocks.sum(partial(_chained, self.function, statistic), callback)

    def take(self, index: torch.Tensor) -> Data:
        """See `Blocks`."""
        return self.function(self.blocks.take(index.cpu().numpy()))

    def by_rows(self) -> "MappedBlocks":
        """See `Blocks`."""
        return replace(self, blocks=self.blocks.by_rows())

    def to(self, *args: Any) -> "MappedBlocks":
        """The observations on a device or in a dtype, as ``Tensor.to``."""
        function = partial(_moved, self.function, args)
        return replace(self, function=function, some=self.some.to(*args))


def _chained(first: Callable[[Data], Data], then: Callable[[Data], Any], data: Data) -> Any:
    return then(first(data))


def _moved(function: Callable[[Data], Data], args: tuple, data: Data) -> Data:
    return function(data).to(*args)


def is_dask(X: Any) -> bool:
    """Whether X is a dask collection; imports nothing."""
    return hasattr(X, "__dask_graph__")


def dask_rows(X: Any) -> tuple[list[Any], list[int]]:
    """Delayed blocks of rows of a dask array or data frame, and how many rows each has."""
    import dask

    if hasattr(X, "rechunk"):
        whole = X if X.ndim == 1 else X.rechunk({1: -1})
        parts, lengths = list(whole.to_delayed().reshape(-1)), list(whole.chunks[0])
    else:
        parts, lengths = X.to_delayed(), [math.nan]
    if any(map(math.isnan, lengths)):
        lengths = list(dask.compute(*map(dask.delayed(len), parts)))
    return parts, [int(length) for length in lengths]


def aligned(column: Any, lengths: list[int], name: str) -> list[Any]:
    """Blocks of a column, delayed where it is dask's, of as many rows as those of X."""
    if column is None:
        return [None] * len(lengths)
    if is_dask(column):
        if hasattr(column, "rechunk") and column.shape[0] == sum(lengths):
            column = column.rechunk({0: tuple(lengths)})
        parts, found = dask_rows(column)
    else:
        array = np.asarray(column)
        parts, found = np.split(array, np.cumsum(lengths)[:-1]), lengths
        found = [len(part) for part in parts]
    if sum(found) != sum(lengths):
        raise ValueError(
            f"{name} must have as many rows as X, {sum(lengths)}; got {sum(found)}. Take both from "
            "one data frame or array."
        )
    if found != lengths:
        raise ValueError(
            f"{name} must have the rows of X in the same blocks; of {sum(found)} rows both have "
            "them, their partitions differ. Take both from one data frame, or give dask arrays of "
            "known chunks."
        )
    return parts


def _weighted(y: Any, weight: Any) -> np.ndarray:
    """The targets of positive weight."""
    y = np.asarray(y)
    return y if weight is None or np.ndim(weight) == 0 else y[np.asarray(weight) > 0]


def _labels_of(distinct: Callable[[Any], np.ndarray], y: Any, weight: Any) -> np.ndarray:
    return distinct(_weighted(y, weight))


def _statistic(statistic: Callable[[Data], Any], first_row: int, *columns: Any) -> Any:
    """A statistic of one block, in one thread of whoever works it out."""
    with one_thread():
        return statistic(observations(first_row, *columns))


def _rows_of(rows: np.ndarray, first_row: int, *columns: Any) -> Data:
    taken = (np.asarray(column)[rows] if np.ndim(column) else column for column in columns)
    return observations(first_row, *taken)

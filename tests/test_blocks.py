"""Sums over blocks of rows: the same whoever works them out, and of all rows."""

import operator
from functools import reduce

import numpy as np
import pytest
import torch

from skgp.blocks import (
    ArrayBlocks,
    DaskBlocks,
    RowReader,
    observations,
    some_numbers,
    sum_of_neighbors,
)

da = pytest.importorskip("dask.array", reason="pip install skgp[distributed]")
dask = pytest.importorskip("dask")


@pytest.fixture(autouse=True)
def synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def columns(rng):
    """X (1000, 3), y (1000,) and weights (1000,), some of which are 0."""
    return rng.normal(size=(1000, 3)), rng.normal(size=1000), rng.integers(0, 3, 1000) / 2.0


def of_dask(X, y, weight, size=128):
    return DaskBlocks.of(*(None if c is None else da.from_array(c, size) for c in (X, y, weight)))


def products(data):
    """X' W X (3, 3) and X' W y (3,) side by side."""
    weighted = data.X if data.weight is None else data.X * data.weight[:, None]
    return weighted.T @ torch.cat([data.X, data.y[:, None]], 1)


@pytest.mark.parametrize("weighted", [True, False])
def test_sum_is_that_of_all_rows_and_the_same_on_dask(columns, weighted):
    X, y, weight = columns
    weight = weight if weighted else None
    W = np.ones(1000) if weight is None else weight
    expected = (X * W[:, None]).T @ np.column_stack([X, y])
    found = ArrayBlocks(X, y, weight, 128).sum(products)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert torch.equal(of_dask(X, y, weight).sum(products), found)


def test_sum_of_neighbors_adds_every_part_once_in_order():
    for n in range(1, 20):
        parts = [(i,) for i in range(n)]
        assert sum_of_neighbors(parts) == reduce(operator.add, parts)
    assert sum_of_neighbors("abcdefg", lambda a, b: f"({a}{b})") == "(((ab)(cd))((ef)g))"


def test_callback_hears_of_the_rows_and_leaves_no_sum_of_some(columns):
    heard = []

    def callback(iteration, info):
        heard.append((iteration, info["rows"]))
        return iteration == 3

    n_rows = ArrayBlocks(*columns[:2], None, 300).sum(len, callback)
    assert (n_rows, heard) == (1000, [(1, 300), (2, 600), (3, 900), (4, 1000)])


def test_take_gives_rows_by_number_without_those_of_weight_0(columns):
    X, y, weight = columns
    index = np.array([3, 127, 128, 640, 999])
    kept = index[weight[index] > 0]
    for blocks in (ArrayBlocks(X, y, weight, 128), of_dask(X, y, weight)):
        data = blocks.take(index)
        for found, expected in zip((data.X, data.y, data.weight), columns, strict=True):
            np.testing.assert_array_equal(found, expected[kept])


def test_some_rows_are_distinct_in_order_and_all_of_few(columns, generator):
    X, y, _ = columns
    y = np.arange(1000.0)
    some = ArrayBlocks(X, y, None, 128).take(some_numbers(1000, 200, generator)).y
    assert len(some) == 200 and bool((some.diff() > 0).all())
    np.testing.assert_array_equal(some_numbers(1000, 1000, generator), np.arange(1000))


def test_rows_are_copied_to_float64(columns):
    X = columns[0].astype(np.float32)
    X.flags.writeable = False
    data = observations(0, X, columns[1])
    assert data.X.dtype == torch.float64
    np.testing.assert_array_equal(data.X, X.astype(np.float64))


@pytest.mark.parametrize(("name", "value"), [("X", np.nan), ("y", np.inf), ("sample_weight", -1.0)])
def test_bad_rows_are_named_by_their_number_among_all(columns, name, value):
    columns = dict(zip(("X", "y", "sample_weight"), columns, strict=True))
    columns[name][700] = value
    for blocks in (ArrayBlocks(*columns.values(), 128), of_dask(*columns.values())):
        with pytest.raises(ValueError, match=f"{name} must hold .* in row 700"):
            blocks.sum(len)


def test_lengths_of_partitions_are_counted_and_compared(columns):
    dd = pytest.importorskip("dask.dataframe")
    import pandas as pd

    X, y, _ = columns
    frame = dd.from_pandas(pd.DataFrame(X, columns=list("abc")).assign(y=y), npartitions=5)
    some = frame[frame.a > 0]
    blocks = DaskBlocks.of(some[["a", "b", "c"]], some.y)
    assert (len(blocks), blocks.n_columns) == ((X[:, 0] > 0).sum(), 3)
    assert blocks.sum(len) == len(blocks)
    with pytest.raises(ValueError, match="y must have as many rows as X"):
        DaskBlocks.of(some[["a"]], y)


def test_lengths_that_differ_are_named_by_their_totals(columns):
    X, y, _ = columns
    unknown = da.from_array(y, 300)
    unknown = unknown[unknown > -100]
    for short in (y[:-1], da.from_array(y[:-1], 300)):
        with pytest.raises(ValueError, match="y must have as many rows as X, 1000; got 999"):
            DaskBlocks.of(da.from_array(X, (128, 3)), short)
    with pytest.raises(ValueError, match="rows of X in the same blocks"):
        DaskBlocks.of(da.from_array(X, (128, 3)), unknown)


def test_row_reader_passes_over_the_rows_left_out(columns):
    X, out = columns[0], np.array([0, 1, 5, 998, 999])
    kept = np.delete(X, out, axis=0)
    reader = RowReader(X, out, lambda rows: 2 * rows)
    assert reader.shape == kept.shape
    rows = np.array([0, 3, 4, 500, 994])
    np.testing.assert_array_equal(reader[rows], 2 * kept[rows])
    np.testing.assert_array_equal(reader[np.arange(995)], 2 * kept)


def test_labels_are_coded_where_they_lie(columns):
    X, _, weight = columns
    y = np.where(X[:, 0] > 1, "b", "a").astype(object)
    y[weight == 0] = "c"
    classes = np.array(["a", "b"])

    def code(part):
        return np.searchsorted(classes, np.asarray(part, str)).clip(max=1)

    for blocks in (ArrayBlocks(X, y, weight, 128), of_dask(X, y, weight)):
        found = blocks.labels(lambda part: np.unique(part.astype(str)))
        assert len(found) == 8 and set(np.concatenate(found)) == {"a", "b"}
        coded = blocks.coded(code)
        expected = float((y[weight > 0] == "b").sum())
        assert coded.sum(lambda data: float(data.y.sum())) == expected
        np.testing.assert_array_equal(coded.by_rows().y, code(y))

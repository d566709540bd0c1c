"""The neighbour search against a ranking of all points by the naive kernel or distance."""

import importlib.util

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, ExpSineSquared, Matern

from skgp.inference.neighbors import search as neighbors
from skgp.inference.neighbors.search import (
    CandidateSearch,
    MultiscaleSearch,
    NeighborSearch,
    distinct,
)
from skgp.kernels import ActiveDims, Cosine


def rows(n, d, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)


def low_rank(n, d, *, rank=8, seed=0):
    mixing = rows(rank, d, seed=99)
    return rows(n, rank, seed=seed) @ mixing + 0.2 * rows(n, d, seed=seed + 1)


def nearest_by_distance(X, Z, scale, k, exclude=None):
    difference = (X.double().numpy()[:, None] - Z.double().numpy()[None]) / np.asarray(scale)
    return ranked((difference**2).sum(-1), k, exclude)


def nearest_by_correlation(kernel, X, Z, k, exclude=None):
    X, Z = X.double().numpy(), Z.double().numpy()
    norms = np.sqrt(kernel.diag(X)[:, None] * kernel.diag(Z))
    correlation = kernel(X, Z) / np.where(norms > 0, norms, 1.0)  # 0 where the kernel vanishes
    return ranked(-correlation.round(10), k, exclude)


def ranked(values, k, exclude):
    if exclude is not None:
        left_out = exclude.numpy() >= 0
        values[np.flatnonzero(left_out), exclude.numpy()[left_out]] = np.inf
    return torch.from_numpy(values.argsort(axis=1, kind="stable")[:, :k])


@pytest.mark.parametrize("method", ["auto", "exact"])
@pytest.mark.parametrize("d", [1, 3, 10, 11, 30, 60])
def test_query_returns_the_nearest_in_order(d, method, dtype):
    Z, X = rows(400, d, dtype=dtype), rows(70, d, seed=1, dtype=dtype)
    scale = np.linspace(0.5, 3.0, d)
    search = NeighborSearch(2.0 * RBF(scale), Z, method)
    assert torch.equal(search.query(X, 7), nearest_by_distance(X, Z, scale, 7))


@pytest.mark.parametrize("d", [2, 20])
def test_query_leaves_out_what_is_excluded(d):
    Z = rows(300, d)
    exclude = torch.arange(300)
    exclude[::3] = -1
    found = NeighborSearch(Matern(0.7), Z).query(Z, 5, exclude)
    assert torch.equal(found, nearest_by_distance(Z, Z, 0.7, 5, exclude))
    assert (found[::3, 0] == torch.arange(300)[::3]).all()


@pytest.mark.parametrize(
    "kernel",
    [
        RBF([1.0, 3.0]) + Matern([2.0, 1.0], nu=1.5),
        ActiveDims(RBF(0.5), [1]),
        Matern(1.0, nu=1.5) + 0.3 * DotProduct(1.0),
        ExpSineSquared(1.0, 2.5) * RBF(4.0),
    ],
    ids=str,
)
def test_query_uses_the_correlation_of_other_kernels(kernel):
    Z, X = rows(300, 2), rows(50, 2, seed=1)
    exclude = torch.arange(50)
    for k in (1, 6):
        found = NeighborSearch(kernel, Z).query(X, k, exclude)
        assert torch.equal(found, nearest_by_correlation(kernel, X, Z, k, exclude))


def test_query_of_a_constant_function_of_the_position_leaves_no_gap_far_from_the_origin():
    # In float32 inputs of 1e7 would all be equal.
    Z, X = rows(200, 2), rows(20, 2, seed=1)
    kernel = RBF([1.0, 3.0]) + RBF([2.0, 1.0])
    near = NeighborSearch(kernel, Z + 1e7).query(X + 1e7, 4)
    assert torch.equal(near, nearest_by_correlation(kernel, X + 1e7, Z + 1e7, 4))


@pytest.mark.parametrize("kernel", [RBF(1.0), RBF(1.0) + ActiveDims(RBF(1.0), [0])], ids=str)
@pytest.mark.parametrize("d", [2, 20])
def test_query_gives_ties_to_the_smaller_index_however_many_they_are(kernel, d):
    Z = torch.zeros(500, d, dtype=torch.float64)
    Z[:300] = rows(3, d).repeat_interleave(100, 0)  # 100 copies of each of three points
    Z[300:, 0] = torch.arange(200) / 10  # and a line, on which pairs are equally far
    search = NeighborSearch(kernel, Z)
    found = search.query(Z, 60)
    assert torch.equal(found[100:200], torch.arange(100, 160).expand(100, -1))
    middle = search.query(Z[400:401], 5)[0].tolist()
    assert middle == [400, 399, 401, 398, 402]


@pytest.mark.parametrize("kernel", [RBF(1.0), RBF(1.0) + ActiveDims(RBF(3.0), [0])], ids=str)
@pytest.mark.parametrize("d", [2, 15])
def test_query_of_a_batch_is_that_of_single_rows(kernel, d):
    Z = (2 * rows(600, d)).round()  # a lattice: many ties
    X = (2 * rows(80, d, seed=1)).round() / 2
    search = NeighborSearch(kernel, Z)
    together = search.query(X, 9)
    alone = torch.cat([search.query(row[None], 9) for row in X])
    assert torch.equal(together, alone)


def test_query_resolves_clusters_that_float32_cannot():
    # Points 1e-5 apart, 100 from the centre: expanded squares in float32 are off by 1e-2.
    Z = torch.cat([100 + 1e-5 * rows(200, 12), -100 + 1e-5 * rows(200, 12, seed=1)])
    X = Z[:30] + 1e-6 * rows(30, 12, seed=2)
    found = NeighborSearch(RBF(1.0), Z).query(X, 5)
    assert torch.equal(found, nearest_by_distance(X, Z, 1.0, 5))


def test_query_by_principal_components_finds_nearly_all():
    Z, X = low_rank(4096, 220), low_rank(25, 220, seed=7)
    search = NeighborSearch(RBF(3.0), Z)
    assert search._metric.principal is not None
    found, true = search.query(X, 16), nearest_by_distance(X, Z, 3.0, 16)
    recall = (found[:, :, None] == true[:, None]).any(1).double().mean()
    assert recall > 0.999


def test_query_without_structure_does_not_trust_principal_components():
    Z, X = rows(5000, 60), rows(20, 60, seed=1)
    search = NeighborSearch(RBF(3.0), Z)
    assert search._metric.principal is None
    assert torch.equal(search.query(X, 8), nearest_by_distance(X, Z, 3.0, 8))


def test_distinct_numbers_the_sets_of_equal_rows_in_order(dtype):
    Z = rows(6, 3, dtype=dtype)[[4, 1, 4, 0, 1, 5]]
    Z[3, 0], Z[5] = 0.0, Z[3]
    Z[5, 0] = -0.0
    first, group = distinct(Z)
    assert first.tolist() == [0, 1, 3]
    assert group.tolist() == [0, 1, 0, 2, 1, 2]


def test_search_names_a_kernel_without_a_metric():
    Z = rows(20, 1).abs() + 1
    for kernel in (ConstantKernel(2.0), 2.0 * ConstantKernel(2.0), DotProduct(0.0)):
        with pytest.raises(ValueError, match="same correlation.*RBF"):
            NeighborSearch(kernel, Z)


def test_search_names_what_does_not_fit():
    Z = rows(20, 2)
    search = NeighborSearch(RBF(), Z)
    with pytest.raises(ValueError, match="auto, exact, faiss, got 'tree'"):
        NeighborSearch(RBF(), Z, "tree")
    with pytest.raises(ValueError, match="n_neighbors=21.*20"):
        search.query(Z, 21)
    with pytest.raises(ValueError, match="n_neighbors=20.*19"):
        search.query(Z, 20, torch.arange(20))
    with pytest.raises(ValueError, match="2 columns"):
        search.query(Z[:, :1], 3)
    with pytest.raises(ValueError, match="one index a row"):
        search.query(Z, 3, torch.arange(3))
    with pytest.raises(ValueError, match="M >= 1"):
        NeighborSearch(RBF(), Z[:0])
    with pytest.raises(ValueError, match="faiss.*exact"):
        NeighborSearch(ExpSineSquared(), Z, "faiss")


def test_query_of_no_rows_is_empty():
    assert NeighborSearch(RBF(), rows(20, 2)).query(rows(0, 2), 3).shape == (0, 3)


@pytest.mark.skipif(importlib.util.find_spec("faiss") is not None, reason="faiss is installed")
def test_search_names_the_extra_that_brings_faiss():
    with pytest.raises(ImportError, match=r"skgp\[neighbors\]"):
        NeighborSearch(RBF(), rows(20, 2), "faiss")


@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="needs faiss")
def test_query_by_faiss_returns_the_nearest():
    Z, X = rows(400, 20), rows(50, 20, seed=1)
    found = NeighborSearch(RBF(2.0), Z, "faiss").query(X, 6)
    assert torch.equal(found, nearest_by_distance(X, Z, 2.0, 6))


# ------------------------------------------------------------------ the search among candidates


@pytest.mark.parametrize("d", [2, 4, 5, 20])
@pytest.mark.parametrize(
    "kernel",
    [
        2.0 * Matern(1.5, nu=0.5),
        ActiveDims(Cosine(3.0), [0]) * RBF(2.0) + 0.1 * RBF(0.5),
        RBF(1.0) + 0.3 * DotProduct(1.0),
    ],
    ids=["distance", "periodic", "linear"],
)
def test_candidate_search_finds_the_most_correlated_but_not_the_row_itself(kernel, d):
    X = rows(300, d)
    candidates = torch.randperm(300, generator=torch.Generator().manual_seed(2))[:200]
    some = torch.cat([candidates[:9], torch.arange(9)])  # candidates and others
    found = CandidateSearch(kernel, X, candidates).query(some, 6)
    place = (some[:, None] == candidates).int()
    exclude = torch.where(place.any(1), place.argmax(1), -1)
    expected = candidates[nearest_by_correlation(kernel, X[some], X[candidates], 6, exclude)]
    assert torch.equal(found.sort(1).values, expected.sort(1).values)


def test_searches_count_the_correlation_as_0_where_the_kernel_vanishes():
    X, everyone = rows(40, 2), torch.arange(40)
    X[7] = 0.0
    kernel = DotProduct(0.0) * RBF(1.0)
    expected = nearest_by_correlation(kernel, X, X, 30, everyone)
    expected[7] = everyone[everyone != 7][:30]  # all others are equally far
    assert torch.equal(NeighborSearch(kernel, X).query(X, 30, everyone), expected)
    found = CandidateSearch(kernel, X, everyone).query(everyone, 30)
    others = everyone != 7
    assert torch.equal(found[others].sort(1).values, expected[others].sort(1).values)
    assert not (found[7] == 7).any()


@pytest.mark.parametrize("d", [3, 12])
def test_candidate_search_without_a_kernel_scales_columns_by_their_spread(d):
    X = rows(200, d) * torch.logspace(-2, 3, d, dtype=torch.float64)
    X[:, 1] = 7.0  # constant: no spread to divide by
    spread = np.where(X.std(0) > 0, X.std(0, correction=0), 1.0)
    everyone = torch.arange(200)
    found = CandidateSearch(None, X, everyone).query(everyone, 5)
    expected = nearest_by_distance(X, X, spread, 5, everyone)
    assert torch.equal(found.sort(1).values, expected.sort(1).values)


def test_candidate_search_in_tiles_equals_that_in_one(monkeypatch):
    X, everyone = rows(300, 6), torch.arange(300)
    search = CandidateSearch(RBF(1.0) + RBF([1.0] * 5 + [2.0]), X, everyone)
    whole = search.query(everyone, 3)
    monkeypatch.setattr(neighbors, "NEIGHBOR_TILE", 7 * 300)
    assert torch.equal(search.query(everyone, 3).sort(1).values, whole.sort(1).values)


def test_multiscale_search_takes_the_nearest_of_disjoint_shares_of_the_candidates():
    X, everyone = rows(600, 3), torch.arange(600)
    kernel = RBF([1.0, 2.0, 0.5])
    found = MultiscaleSearch(kernel, X, everyone, 16, 3).query(everyone)  # 600 // 256 are too few
    assert found.shape == (600, 16) and not (found == everyone[:, None]).any()
    assert all(len(set(near.tolist())) == 16 for near in found)
    coarse = found[:, 12:].unique()
    assert len(coarse) <= 600 // 16 and not torch.isin(found[:, :12], coarse).any()
    scaled = X / torch.tensor([1.0, 2.0, 0.5])
    distance = torch.cdist(scaled, scaled).fill_diagonal_(torch.inf)
    for part, share in ((coarse, 4), (everyone[~torch.isin(everyone, coarse)], 12)):
        nearest = part[distance[:, part].topk(share, largest=False).indices]
        picked = found[:, 12:] if share == 4 else found[:, :12]
        assert torch.equal(nearest.sort(1).values, picked.sort(1).values)


def test_multiscale_search_of_one_scale_is_the_candidate_search():
    X, everyone = rows(300, 6), torch.arange(300)
    expected = CandidateSearch(RBF(1.0), X, everyone[50:]).query(everyone, 7)
    assert torch.equal(MultiscaleSearch(RBF(1.0), X, everyone[50:], 7, 1).query(everyone), expected)

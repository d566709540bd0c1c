"""Steps on sums over blocks of rows are those on all rows at once."""

import numpy as np
import pytest
import torch

from skgp.blocks import sum_of_neighbors
from skgp.data import Data
from skgp.inference.defaults import SHARED_JITTER
from skgp.inference.natural import FullSystem, fit_natural_sites, natural_steps
from skgp.inference.neighbors.conditionals import SharedConditionals, Tiles
from skgp.inference.neighbors.search import active_sets
from skgp.inference.neighbors.sums import BlocksProblem, FullRows, LocalRows
from skgp.inference.neighbors.system import local_system
from skgp.kernels.gram import gram_diag
from skgp.linalg.runtime import MemoryBudgetError, memory_limit
from tests.covering import slow
from tests.inference.test_natural import LIKELIHOODS, problem_of

TIGHT = {"tol": 1e-15, "max_iter": 60}
CG = {"cg_tol": 1e-12, "cg_max_iter": 500}
NAMES = sorted(LIKELIHOODS)


class Slices:
    """Rows in blocks that end at `ends`."""

    def __init__(self, data, ends):
        self.data, self.ends, self.n_passes = data, ends, 0

    def sum(self, statistic, callback=None):
        self.n_passes += 1
        starts = [0, *self.ends[:-1]]
        parts = (self.data.take(slice(*ends)) for ends in zip(starts, self.ends, strict=True))
        found = []
        for number, part in enumerate(parts, 1):
            found.append(statistic(part))
            if callback is not None:
                callback(number, {"rows": self.ends[number - 1]})
        return sum_of_neighbors(found)


def case(name, **options):
    problem, likelihood = problem_of(name, **options)
    X, Y, Z, _, offset, weight = problem.tensors
    data = Data(X, Y, weight)
    settings = {
        "kernel": problem.kernel,
        "likelihood": likelihood,
        "offset": offset,
        "Z": Z,
        "kl_weight": problem.kl_weight,
        "total": data.total,
        "n_neighbors": problem.active.shape[1],
    }
    return data, settings


def in_memory(data, s, start=None):
    active = active_sets(s["kernel"], data.X, s["Z"], s["n_neighbors"])
    tiles = Tiles(s["kernel"], data.X, s["Z"], active)
    system = local_system(tiles, kl_weight=s["kl_weight"], weight=data.weight)
    return fit_natural_sites(
        system, data.y, s["likelihood"], offset=s["offset"], start=start, **TIGHT, **CG
    )


def in_memory_full(data, s):
    given = SharedConditionals(s["kernel"], s["Z"], SHARED_JITTER * gram_diag(s["kernel"], s["Z"]))
    system = FullSystem(*given.features(data.X), s["kl_weight"], data.weight, given.factor)
    return fit_natural_sites(system, data.y, s["likelihood"], offset=s["offset"], **TIGHT)


def assert_same(found, expected, rtol=1e-6):
    for name in ("mean", "var", "root"):
        a, b = (getattr(each.q, name) for each in (found, expected))
        if b is not None:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))
    np.testing.assert_allclose(found.bound, expected.bound, rtol=1e-10)


@pytest.mark.parametrize("name", slow(NAMES, but=[NAMES[0], *NAMES[1::2]]))
def test_steps_on_blocks_end_where_those_on_all_rows_do(name):
    data, settings = case(name, weighted=name != "logit")
    blocks = Slices(data, [7, 8, 23, len(data)])
    problem = BlocksProblem(blocks, LocalRows(**settings), **CG)
    expected = in_memory(data, settings)
    start = None if name == "gaussian" else expected.q
    found = natural_steps(problem, start=start, **TIGHT)
    assert_same(found, expected)
    if name == "gaussian":
        assert blocks.n_passes == 1
    else:  # from elsewhere, too
        assert_same(
            natural_steps(BlocksProblem(blocks, LocalRows(**settings), **CG), **TIGHT),
            expected,
            1e-5,
        )


@pytest.mark.parametrize("name", slow(NAMES, but=NAMES[::2]))
def test_full_covariance_on_blocks_is_that_on_all_rows(name):
    data, settings = case(name, n_neighbors=12)
    blocks = Slices(data, [7, 8, 23, len(data)])
    problem = BlocksProblem(blocks, FullRows(**settings), **CG)
    found = natural_steps(problem, **TIGHT)
    assert_same(found, in_memory_full(data, settings), 1e-6)
    assert blocks.n_passes == 1 or name != "gaussian"


def test_gaussian_bound_without_a_pass_is_that_of_a_pass():
    for kind, n_neighbors in ((LocalRows, 5), (FullRows, 12)):
        data, settings = case("gaussian", n_neighbors=n_neighbors)
        problem = BlocksProblem(Slices(data, [10, len(data)]), kind(**settings), **CG)
        fit = natural_steps(problem)
        np.testing.assert_allclose(fit.bound, problem.start(fit.q).bound, rtol=1e-12)


def test_single_precision_sums_in_double():
    data, settings = case("probit")
    expected = natural_steps(
        BlocksProblem(Slices(data, [9, len(data)]), LocalRows(**settings), **CG)
    )
    single = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
    problem = BlocksProblem(
        Slices(data.to(torch.float32), [9, len(data)]), LocalRows(**single), **CG
    )
    found = natural_steps(problem)
    assert found.q.mean.dtype == torch.float64
    np.testing.assert_allclose(found.q.mean, expected.q.mean, atol=2e-3)


def test_sums_that_do_not_fit_are_refused_before_they_begin():
    data, settings = case("gaussian")
    for rows in (LocalRows(**settings), FullRows(**settings)):
        rows.require_room(data.X)
        with memory_limit(1e3), pytest.raises(MemoryBudgetError, match="sums over blocks.*M=12"):
            rows.require_room(data.X)


@pytest.mark.parametrize("n_heard", [1, 5, 9, 14])
def test_steps_stopped_within_a_pass_end_with_the_last_complete_one(n_heard):
    """In the first step after its two passes; the ELBO is that of all rows at the q returned."""
    data, settings = case("logit")
    blocks, heard = Slices(data, [7, 8, 23, len(data)]), []

    def callback(iteration, info):
        heard.append(info)
        return "rows" in info and len(heard) >= n_heard

    problem = BlocksProblem(blocks, LocalRows(**settings), **CG, callback=callback)
    fit = natural_steps(problem, **TIGHT)
    assert not fit.converged and len(fit.history) == max(1, (n_heard - 1) // 4 - 1)
    again = BlocksProblem(Slices(data, [len(data)]), LocalRows(**settings), **CG)
    np.testing.assert_allclose(fit.bound, again.start(fit.q).bound, rtol=1e-12)

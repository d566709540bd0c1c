"""The cost of an iteration depends neither on n nor on m: elements that its operations touch."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skgp.inference.stochastic.basis import FourierBasis
from skgp.inference.stochastic.engine import SGDOptions
from skgp.inference.stochastic.gaussian import SGDSolver
from skgp.inference.stochastic.likelihood import LikelihoodSolver
from skgp.inference.stochastic.state import LikelihoodState, SGDState
from skgp.kernels import FourierFeatures
from skgp.likelihoods import Bernoulli
from tests.covering import slow_case

SMALL, LARGE = 2_000, 50_000
ITERATIONS = 6


class Touched(TorchDispatchMode):
    """Counts elements written: of new tensors, and of those changed in place but by indices."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if torch.is_tensor(x)}
        in_place = function.__name__.split(".")[0].endswith("_")
        for x in tree_leaves(out):
            if torch.is_tensor(x) and "index_put" not in function.__name__:
                is_view = x.untyped_storage().data_ptr() in given
                self.n += x.numel() if in_place or not is_view else 0
        return out


def solver_of(kind, n, m, learns):
    X = torch.linspace(-3, 3, n, dtype=torch.float64)[:, None]
    y = (3 * X[:, 0]).sin()
    basis = FourierBasis(FourierFeatures(1.0 * RBF(1.0), m, 1, seed=0, block_size=50))
    generator = torch.Generator().manual_seed(0)
    options = SGDOptions(20, 400, max_iter=3 * ITERATIONS, learn_hyperparameters=learns)
    if kind == "regression":
        state = SGDState.start(X, y, basis, 0.1, n_support=40, generator=generator)
        return SGDSolver(X, y, basis, state, options, generator)
    likelihood = Bernoulli("logit")
    start = dict(n_support=40, generator=generator)
    state = LikelihoodState.start(X, y.sign(), basis, likelihood, **start)
    return LikelihoodSolver(X, y.sign(), basis, state, options, generator, likelihood)


def touched(*problem):
    """Elements an iteration."""
    solver = solver_of(*problem)
    solver.iterate(0)
    with Touched() as mode:
        for iteration in range(1, 1 + ITERATIONS):
            solver.iterate(iteration)
    return mode.n / ITERATIONS


@pytest.mark.parametrize(
    ("kind", "learns"), [("regression", True), slow_case("classification", False)]
)
def test_iteration_touches_as_many_elements_whatever_n_and_m(kind, learns):
    base = touched(kind, SMALL, SMALL, learns)
    assert base > 20 * 400
    for n, m in ((LARGE, SMALL), (SMALL, LARGE)):
        # Of many functions fewer are met again, whose running sums would be moved.
        assert 0.7 * base < touched(kind, n, m, learns) < 1.3 * base


def test_count_sees_what_depends_on_m():
    with Touched() as mode:
        torch.zeros(1000).zero_()
    assert mode.n == 2000
    weights, few = torch.zeros(1000), torch.arange(10)
    with Touched() as mode:
        weights[few] += 1
    assert mode.n < 50


def test_memory_map_is_read_by_the_sampled_rows_alone(tmp_path):
    X = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", np.float32, (1000, 1))
    X[:] = np.linspace(-3, 3, 1000)[:, None]

    class Counting(np.ndarray):
        n_read = 0

        def __getitem__(self, index):
            out = np.asarray(super().__getitem__(index))
            Counting.n_read += len(out)
            return out

    counting, y = X.view(Counting), np.sin(3 * X[:, 0])
    basis = FourierBasis(FourierFeatures(RBF(1.0), 400, 1, seed=0, block_size=50))
    generator = torch.Generator().manual_seed(0)
    state = SGDState.start(counting, y, basis, 0.1, n_support=40, generator=generator)
    solver = SGDSolver(counting, y, basis, state, SGDOptions(20, 100), generator)
    Counting.n_read = 0
    solver.iterate(0)
    assert Counting.n_read == 20

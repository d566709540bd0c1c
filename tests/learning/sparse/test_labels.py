"""Kernels of few labels, by labels held out."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_predict
from skgp.learning.sparse.evidence import best_evidence
from skgp.learning.sparse.objective import Objective, Problem, Settings
from skgp.learning.sparse.start import best_of_labels, kernels_that_predict
from skgp.likelihoods import Bernoulli
from skgp.optim.stopping import StopRecorder

D = 12
SHARED, SEPARATE = (ConstantKernel(4.0) * RBF(each) for each in (4.0, np.full(D, 4.0)))


def problem_of(f, n, *, kernels=(SHARED, SEPARATE), seed=0):
    """Labels, for which f (n,) of the inputs (n, D) decides."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, D))
    y = np.where(f(X) > 0, 1.0, -1.0)
    data = Data(torch.from_numpy(X), torch.from_numpy(y)[:, None])
    generator, offset = torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.float64)
    objective, settings = Objective(Bernoulli("probit"), "elbo"), Settings(start_iter=15)
    return Problem(
        list(kernels),
        data,
        objective,
        settings,
        lambda kernel, n_points=None: data.X,
        offset,
        generator,
        StopRecorder(None),
    )


def test_kernels_that_predict_have_a_length_scale_a_column_where_few_columns_matter():
    found = kernels_that_predict(problem_of(lambda X: np.sin(2 * X[:, 0]) + X[:, 1], 240))
    assert len(found) == 1 and found[0] is SEPARATE


def test_kernels_that_predict_share_a_length_scale_where_all_columns_matter():
    found = kernels_that_predict(problem_of(lambda X: X.sum(1), 240))
    assert len(found) == 1 and found[0] is SHARED


@pytest.mark.parametrize("n, kernels", [(100, (SHARED, SEPARATE)), (240, (SHARED, SHARED))])
def test_kernels_that_predict_are_all_without_labels_or_kinds_to_choose(n, kernels):
    found = kernels_that_predict(problem_of(lambda X: X[:, 0], n, kernels=kernels))
    assert [id(kernel) for kernel in found] == [id(kernel) for kernel in kernels]


def test_best_of_labels_predicts_new_labels_better_than_the_likeliest_kernel():
    """A ball of labels: the evidence is greatest for a kernel of too small an amplitude."""
    problem, new = (
        problem_of(lambda X: (X**2).sum(1) - 11.3, n, kernels=[SHARED], seed=seed)
        for n, seed in ((150, 0), (1000, 1))
    )
    data, likelihood = problem.data, problem.objective.likelihood

    def loss(kernel):
        fit = LaplaceEvidence.of(kernel, data, likelihood, problem.offset).fit(kernel.theta)
        mean, var = laplace_predict(fit, kernel, data.X, new.data.X)
        z = (new.data.y * mean / (1 + var).sqrt()).numpy()
        return -norm.logcdf(z).mean()

    assert loss(best_of_labels(problem).kernel) < loss(best_evidence(problem).kernel) - 0.02

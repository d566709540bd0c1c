"""Anderson's mixing of fixed-point iterations."""

import math

import torch

from skgp.optim.defaults import MIXED_PLACES
from skgp.optim.scoring import AndersonMixing


def linear_map(p, generator):
    """A contraction of p numbers, its matrix and its fixed point."""
    root = torch.randn(p, p, generator=generator, dtype=torch.float64)
    A = 0.9 * root / torch.linalg.matrix_norm(root, 2)
    b = torch.randn(p, generator=generator, dtype=torch.float64)
    return (lambda x: A @ x + b), torch.linalg.solve(torch.eye(p, dtype=b.dtype) - A, b)


def test_a_linear_map_is_solved_in_as_many_steps_as_it_has_dimensions(generator):
    # As GMRES (Walker and Ni, theorem 2.2): p + 1 residuals span all there is.
    apply, fixed = linear_map(MIXED_PLACES, generator)
    mixing, x = AndersonMixing(), torch.zeros_like(fixed)
    for _ in range(MIXED_PLACES + 2):
        x = mixing(x, apply(x), lambda changes: changes)
    torch.testing.assert_close(x, fixed, rtol=1e-6, atol=1e-6)


def test_a_mixed_place_is_the_image_of_the_least_residual_in_the_norm_given(generator):
    apply, _ = linear_map(4, generator)
    scale = torch.tensor([1.0, 3.0, 0.1, 2.0], dtype=torch.float64)
    mixing, x, places = AndersonMixing(), torch.zeros(4, dtype=torch.float64), []
    for _ in range(3):
        places.append((x, apply(x) - x))
        x = mixing(x, apply(x), lambda changes: scale * changes)
    # Affine combinations of the places, of weights that sum to 1.
    at, residual = (torch.stack(each) for each in zip(*places, strict=True))
    past = (scale * (residual[-1] - residual[:-1])).T
    share = torch.linalg.lstsq(past, scale * residual[-1]).solution
    weight = torch.cat([share, 1 - share.sum(0, keepdim=True)])
    torch.testing.assert_close(x, weight @ (at + residual), rtol=1e-7, atol=1e-7)


def test_after_a_restart_and_where_nothing_changed_it_goes_to_the_image():
    mixing, ones = AndersonMixing(), torch.ones(2, dtype=torch.float64)
    for _ in range(2):  # no change of the residual says nothing
        assert torch.equal(mixing(ones, 2 * ones, lambda changes: changes), 2 * ones)
    assert len(mixing) == 2
    mixing.restart()
    assert len(mixing) == 0
    assert torch.equal(mixing(0 * ones, ones, lambda changes: changes * math.nan), ones)

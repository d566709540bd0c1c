"""What every likelihood of numbers must obey: a distribution function, quantiles, draws.

A likelihood's test class inherits `NumericLikelihoodContract` in place of `LikelihoodContract`.
"""

import numpy as np
import pytest
import torch

from tests.contracts.likelihoods import MEANS, LikelihoodContract, float64
from tests.same import assert_same


class NumericLikelihoodContract(LikelihoodContract):
    """The same for a `NumericLikelihood`."""

    LEVELS = (1e-6, 0.01, 0.3, 0.5, 0.9, 0.999)

    def test_cdf_and_quantile_broadcast_and_keep_dtype(self, dtype):
        y = torch.as_tensor(self.targets(), dtype=dtype)
        mean, var = torch.tensor([[0.3], [1.0]], dtype=dtype), torch.ones((), dtype=dtype)
        value = self.likelihood().cdf(y, mean, var)
        assert value.shape == (2, 4) and value.dtype == dtype
        torch.testing.assert_close(self.likelihood().cdf(y[2], mean[1, 0], var), value[1, 2])
        back = self.likelihood().quantile(value.clamp(1e-3, 0.999), mean, var)
        assert back.shape == (2, 4) and back.dtype == dtype
        empty = torch.zeros(0, dtype=dtype)
        assert self.likelihood().cdf(empty, empty, empty).shape == (0,)
        assert self.likelihood().quantile(empty, empty, empty).shape == (0,)

    @pytest.mark.parametrize("variance", [0.0, 1e-6, 0.3, 1.1, 5.0, 100.0])
    def test_cdf_is_monotone_between_0_and_1(self, variance):
        likelihood = self.likelihood()
        for centre in MEANS:
            low, high = likelihood.quantile(
                *float64([1e-4, 1 - 1e-4], np.full(2, centre), np.full(2, variance))
            )
            y = torch.linspace(float(low), float(high), 201, dtype=torch.float64)
            value = likelihood.cdf(y, torch.full_like(y, centre), torch.full_like(y, variance))
            assert (value >= 0).all() and (value <= 1).all()
            assert value.diff().min() > -1e-8

    def test_cdf_grows_by_the_predictive_density(self):
        likelihood = self.likelihood()
        for variance in (0.0, *self.VARIANCES):
            y, mean, var = float64(self.targets(), MEANS, np.full(4, variance))
            density = likelihood.log_predictive(y, mean, var).exp()
            h = 1.0 if self.DISCRETE else 1e-4
            left, right = (y - 1, y) if self.DISCRETE else (y - h, y + h)
            growth = likelihood.cdf(right, mean, var) - likelihood.cdf(left, mean, var)
            growth /= h if self.DISCRETE else 2 * h
            torch.testing.assert_close(growth, density, rtol=1e-6, atol=1e-8)

    @pytest.mark.parametrize("variance", [0.0, 1e-6, 0.3, 1.1, 5.0, 100.0])
    def test_quantile_inverts_the_cdf(self, variance):
        likelihood = self.likelihood()
        q, mean = (grid.ravel() for grid in np.meshgrid(self.LEVELS, MEANS))
        q, mean, var = float64(q, mean, np.full(q.shape, variance))
        y = likelihood.quantile(q, mean, var)
        if not self.DISCRETE:
            torch.testing.assert_close(likelihood.cdf(y, mean, var), q, rtol=1e-8, atol=0)
            return
        assert torch.equal(y, y.floor()) and (likelihood.cdf(y, mean, var) > q - 1e-12).all()
        # Of huge counts the next smaller one has the same probability to machine precision.
        below = likelihood.cdf(y - (1e-9 * y).clamp_min(1).ceil(), mean, var)
        assert (below < q).all()

    @pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, np.nan])
    def test_quantile_refuses_what_is_no_probability(self, bad):
        q, mean, var = float64([0.5, bad], np.zeros(2), np.ones(2))
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            self.likelihood().quantile(q, mean, var)

    def test_cdf_and_quantile_refuse_bad_values(self):
        y, mean, var = float64([0.5, 0.5], np.zeros(2), [1.0, -1.0])
        for name in ("cdf", "quantile"):
            with pytest.raises(ValueError, match="var must be non-negative"):
                getattr(self.likelihood(), name)(y, mean, var)
        with pytest.raises(ValueError, match="y contains NaN"):
            self.likelihood().cdf(y * np.nan, mean, mean)

    def test_sample_keeps_shape_and_dtype_and_repeats(self, dtype):
        f = torch.zeros(3, 20, dtype=dtype)
        first, again = (
            self.likelihood().sample(f, torch.Generator().manual_seed(1)) for _ in range(2)
        )
        assert first.shape == (3, 20) and first.dtype == dtype
        assert_same(first, again)
        assert not torch.equal(first[0], first[1])
        self.likelihood().log_prob(first, f)  # of admissible values

    def test_sample_has_the_conditional_distribution(self, generator):
        likelihood, n = self.likelihood(), 20_000
        for centre in (0.4, 2.0):
            f = torch.full((n,), centre, dtype=torch.float64)
            y = likelihood.sample(f, generator)
            zero = torch.zeros(1, dtype=torch.float64)
            mean, var = likelihood.predictive_moments(f[:1], zero)
            assert abs(float((y.mean() - mean) / (var / n).sqrt())) < 4
            for level in (0.1, 0.5, 0.97):
                threshold = likelihood.quantile(zero + level, f[:1], zero)
                p = float(likelihood.cdf(threshold, f[:1], zero))
                z = (float((y <= threshold).double().mean()) - p) / np.sqrt(p * (1 - p) / n)
                assert abs(z) < 4

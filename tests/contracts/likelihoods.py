"""What every likelihood must obey; a likelihood's own test class inherits it.

``class TestGaussian(LikelihoodContract)`` supplies `likelihood`, `targets`, `support` and whatever
of the other attributes differs. Integrals are compared with composite Gauss-Legendre sums, which
share no code with the library's quadrature.
"""

import numpy as np
import pytest
import torch

from skgp.likelihoods import Likelihood
from tests.reference import fine_grid

MEANS = (-1.3, 0.0, 0.4, 2.0)
WIDE_MEANS = (-8.0, -2.5, 0.0, 1.0, 8.0)


class LikelihoodContract:
    """Inherit, and override what is named in capitals or raises NotImplementedError.

    Attributes
    ----------
    VARIANCES : tuple of float
        Latent variances at which integrals are compared.
    WIDE_VARIANCES : tuple of float
        The same for the comparisons over wide ranges.
    TOLERANCE : float
        Absolute agreement with those integrals, in nats for logarithms.
    N_POINTS : int
        Quadrature nodes for the comparison of quadrature with closed forms.
    DISCRETE : bool
        Whether `support` lists the values of y (counts, labels) or brackets them (an interval).
    BAD_TARGETS : tuple of float
        Values of y that must be refused.
    """

    VARIANCES: tuple[float, ...] = (0.05, 0.7, 2.5)
    WIDE_VARIANCES: tuple[float, ...] = (1e-6, 1e-3, 0.08, 0.7, 3.0, 20.0, 100.0)
    TOLERANCE = 1e-8
    N_POINTS = 60
    DISCRETE = False
    BAD_TARGETS: tuple[float, ...] = (np.nan, np.inf)

    def likelihood(self) -> Likelihood:
        """The likelihood under test."""
        raise NotImplementedError

    def targets(self) -> np.ndarray:
        """Four admissible observations."""
        raise NotImplementedError

    def support(self, f: float) -> np.ndarray:
        """All values of y with non-negligible probability given f, or the edges of panels in y."""
        raise NotImplementedError

    def parameters(self) -> list[torch.Tensor]:
        """Leaf tensors of `differentiable_likelihood`."""
        return []

    def differentiable_likelihood(self, parameters: list[torch.Tensor]) -> Likelihood:
        """The likelihood as a function of its own parameters."""
        return self.likelihood()

    def breaks(self, y: float) -> tuple[float, ...]:
        """Values of f at which log p(y | f) has a kink."""
        return ()

    def wide_targets(self) -> np.ndarray:
        """Observations for the comparisons over wide ranges of means and variances."""
        return self.targets()

    def centres(self, y: float) -> tuple[tuple[float, float], ...]:
        """(place, scale) of features of log p(y | f) that are narrow beside wide variances."""
        return ()

    # --- shapes, dtypes, refusals ---------------------------------------------------------------

    @pytest.mark.parametrize("name", ["log_prob", "expected_log_prob", "log_predictive"])
    def test_results_broadcast_and_keep_dtype(self, name, dtype):
        y = torch.as_tensor(self.targets(), dtype=dtype)
        mean = torch.tensor(MEANS, dtype=dtype)[:, None]
        arguments = (y, mean) if name == "log_prob" else (y, mean, torch.ones((), dtype=dtype))
        value = getattr(self.likelihood(), name)(*arguments)
        assert value.shape == (4, 4) and value.dtype == dtype
        corner = [argument.expand(4, 4)[2, 1] for argument in arguments]
        torch.testing.assert_close(getattr(self.likelihood(), name)(*corner), value[2, 1])

    @pytest.mark.parametrize("name", ["derivatives", "expected_derivatives"])
    def test_derivatives_broadcast_and_keep_dtype(self, name, dtype):
        y = torch.as_tensor(self.targets(), dtype=dtype)
        mean = torch.tensor(MEANS, dtype=dtype)[:, None]
        arguments = (y, mean) if name == "derivatives" else (y, mean, torch.ones((), dtype=dtype))
        values = getattr(self.likelihood(), name)(*arguments)
        corner = [argument.expand(4, 4)[2, 1] for argument in arguments]
        for value, alone in zip(values, getattr(self.likelihood(), name)(*corner), strict=True):
            assert value.shape == (4, 4) and value.dtype == dtype
            torch.testing.assert_close(alone, value[2, 1])

    def test_predictive_moments_broadcast_and_keep_dtype(self, dtype):
        mean = torch.tensor(MEANS, dtype=dtype)
        var = torch.tensor([[0.1], [1.0]], dtype=dtype)
        for value in self.likelihood().predictive_moments(mean, var):
            assert value.shape == (2, 4) and value.dtype == dtype

    def test_empty_input_gives_empty_output(self):
        empty = torch.zeros(0, dtype=torch.float64)
        likelihood = self.likelihood()
        assert likelihood.log_prob(empty, empty).shape == (0,)
        assert likelihood.expected_log_prob(empty, empty, empty).shape == (0,)
        assert likelihood.log_predictive(empty, empty, empty).shape == (0,)
        assert likelihood.derivatives(empty, empty)[1].shape == (0,)
        assert likelihood.expected_derivatives(empty, empty, empty)[1].shape == (0,)
        assert likelihood.predictive_moments(empty, empty)[1].shape == (0,)

    def test_shapes_that_do_not_broadcast_are_named(self):
        y, mean, var = float64(self.targets(), np.zeros(3), np.ones(4))
        with pytest.raises(ValueError, match=r"broadcast.*mean \(3,\)"):
            self.likelihood().log_predictive(y, mean, var)

    def test_mode_broadcasts_and_keeps_dtype(self, dtype):
        y = torch.as_tensor(self.targets(), dtype=dtype)
        mode = self.likelihood().mode(y[:, None])
        assert mode.shape == (4, 1) and mode.dtype == dtype
        with pytest.raises(ValueError, match="y must be a floating-point tensor"):
            self.likelihood().mode(y.long())

    def test_mixed_dtypes_are_refused(self):
        y, f = float64(self.targets(), np.zeros(4))
        with pytest.raises(ValueError, match="one dtype"):
            self.likelihood().log_prob(y, f.float())
        with pytest.raises(ValueError, match="y must be a floating-point tensor"):
            self.likelihood().log_prob(y.long(), f)

    @pytest.mark.parametrize(
        "name", ["expected_log_prob", "expected_derivatives", "log_predictive"]
    )
    @pytest.mark.parametrize("bad", [-1e-3, np.nan])
    def test_bad_variances_are_refused(self, name, bad):
        y, mean, var = float64(self.targets(), np.zeros(4), [1.0, 1.0, bad, 1.0])
        with pytest.raises(ValueError, match="var must be non-negative"):
            getattr(self.likelihood(), name)(y, mean, var)
        with pytest.raises(ValueError, match="var must be non-negative"):
            self.likelihood().predictive_moments(mean, var)

    def test_bad_targets_are_refused(self):
        for bad in self.BAD_TARGETS:
            y, mean, var = float64([bad], [0.0], [1.0])
            conditional = ("log_prob", "derivatives")
            averaged = ("expected_log_prob", "expected_derivatives", "log_predictive")
            for call in conditional + averaged:
                arguments = (y, mean) if call in conditional else (y, mean, var)
                with pytest.raises(ValueError, match="y "):
                    getattr(self.likelihood(), call)(*arguments)

    # --- values ---------------------------------------------------------------------------------

    def test_log_prob_is_normalised(self):
        for f in MEANS:
            y, weights = self._rule_over_y(f)
            log_prob = self.likelihood().log_prob(*float64(y, np.full_like(y, f)))
            assert weights @ np.exp(log_prob.numpy()) == pytest.approx(1.0, abs=self.TOLERANCE)

    def test_mode_is_the_most_probable_latent_value(self):
        likelihood = self.likelihood()
        (y,) = float64(self.wide_targets())
        mode = likelihood.mode(y)
        # A mode at infinity is approached: the density still grows at 5, towards it only.
        place = torch.where(mode.isinf(), 5 * mode.sign(), mode)
        for step in (-0.3, -1e-3, 1e-3, 0.3):
            is_lower = likelihood.log_prob(y, place + step) < likelihood.log_prob(y, place)
            assert torch.equal(is_lower, mode.isfinite() | (mode.sign() != np.sign(step)))

    def test_log_predictive_within_1e6_of_a_fine_grid(self):
        self._compare_with_fine_grid("log_predictive")

    def test_expected_log_prob_within_1e6_of_a_fine_grid(self):
        self._compare_with_fine_grid("expected_log_prob")

    def _compare_with_fine_grid(self, name):
        """Value and derivatives in mean and variance, each to 1e-6 of one plus its size."""
        likelihood = self.likelihood()
        grid = np.meshgrid(self.wide_targets(), WIDE_MEANS, self.WIDE_VARIANCES)
        cases = np.stack([column.ravel() for column in grid])
        expected = [
            getattr(fine_grid, name)(likelihood, *case, self.breaks(case[0]), self.centres(case[0]))
            for case in cases.T
        ]
        y, mean, var = float64(*cases)
        mean.requires_grad_(), var.requires_grad_()
        value = getattr(likelihood, name)(y, mean, var)
        value.sum().backward()
        for result, reference in zip(
            (value.detach(), mean.grad, var.grad), np.transpose(expected), strict=True
        ):
            error = np.abs(result.numpy() - reference) / (1 + np.abs(reference))
            assert error.max() < 1e-6, f"at y, mean, var = {cases[:, error.argmax()]}"

    def test_expected_log_prob_equals_fine_integral(self):
        for y, mean, var, f, weights in self._fine_integrals():
            log_prob = self.likelihood().log_prob(*float64(np.full_like(f, y), f)).numpy()
            value = self.likelihood().expected_log_prob(*float64(y, mean, var))
            assert float(value) == pytest.approx(weights @ log_prob, abs=self.TOLERANCE)

    def test_log_predictive_equals_fine_integral(self):
        for y, mean, var, f, weights in self._fine_integrals():
            log_prob = self.likelihood().log_prob(*float64(np.full_like(f, y), f)).numpy()
            value = self.likelihood().log_predictive(*float64(y, mean, var))
            expected = np.log(weights @ np.exp(log_prob))
            assert float(value) == pytest.approx(expected, abs=self.TOLERANCE)

    def test_expected_derivatives_equal_fine_integrals(self):
        for y, mean, var, f, weights in self._fine_integrals():
            derivatives = self.likelihood().derivatives(*float64(np.full_like(f, y), f))
            first, second = self.likelihood().expected_derivatives(*float64(y, mean, var))
            expected = weights @ derivatives[0].numpy()
            assert float(first) == pytest.approx(expected, abs=self.TOLERANCE)
            # By parts, E[d2] = E[(f - m) d1] / v, which sees the delta function of a kink as well.
            expected = weights @ ((f - mean) * derivatives[0].numpy()) / var
            assert float(second) == pytest.approx(expected, abs=10 * self.TOLERANCE)

    def test_derivatives_equal_finite_differences(self):
        likelihood = self.likelihood()
        y, f = float64(self.targets(), MEANS)
        h = 1e-4
        left, right = likelihood.log_prob(y, f - h), likelihood.log_prob(y, f + h)
        first, second = likelihood.derivatives(y, f)
        torch.testing.assert_close(first, (right - left) / (2 * h), rtol=1e-7, atol=1e-7)
        curvature = (right - 2 * likelihood.log_prob(y, f) + left) / h**2
        torch.testing.assert_close(second, curvature, rtol=1e-5, atol=1e-5)

    def test_expected_derivatives_are_gradients_of_the_expected_log_prob(self):
        # Bonnet's and Price's theorems.
        likelihood = self.likelihood()
        for variance in self.VARIANCES:
            y, mean, var = float64(self.targets(), MEANS, np.full(4, variance))
            mean.requires_grad_(), var.requires_grad_()
            likelihood.expected_log_prob(y, mean, var).sum().backward()
            first, second = likelihood.expected_derivatives(y, mean.detach(), var.detach())
            tolerance = {"rtol": 0, "atol": 10 * self.TOLERANCE}
            torch.testing.assert_close(first, mean.grad, **tolerance)
            torch.testing.assert_close(second, 2 * var.grad, **tolerance)

    def test_predictive_moments_equal_fine_integrals(self):
        for _, mean, var, f, weights in self._fine_integrals():
            first, second = self._raw_moments(f[weights > 1e-22])
            weights = weights[weights > 1e-22]
            mean_y, var_y = self.likelihood().predictive_moments(*float64(mean, var))
            expected = weights @ first
            scale = 1 + weights @ second
            assert float(mean_y) == pytest.approx(expected, abs=self.TOLERANCE * scale)
            variance = weights @ (second - first**2) + weights @ (first - expected) ** 2
            assert float(var_y) == pytest.approx(variance, abs=self.TOLERANCE * scale)

    def test_zero_variance_gives_the_conditional(self):
        likelihood = self.likelihood()
        y, mean, zero = float64(self.targets(), MEANS, np.zeros(4))
        log_prob = likelihood.log_prob(y, mean)
        torch.testing.assert_close(likelihood.expected_log_prob(y, mean, zero), log_prob)
        torch.testing.assert_close(likelihood.log_predictive(y, mean, zero), log_prob)
        averaged = likelihood.expected_derivatives(y, mean, zero)
        torch.testing.assert_close(averaged, likelihood.derivatives(y, mean))
        first, second = self._raw_moments(MEANS)
        mean_y, var_y = likelihood.predictive_moments(mean, zero)
        np.testing.assert_allclose(mean_y, first, atol=self.TOLERANCE * 10)
        np.testing.assert_allclose(var_y, second - first**2, atol=self.TOLERANCE * 10)

    def test_zero_variance_gradients_are_finite(self):
        y, mean, zero = float64(self.targets(), MEANS, np.zeros(4))
        for name in ("expected_log_prob", "log_predictive"):
            arguments = (mean.clone().requires_grad_(), zero.clone().requires_grad_())
            getattr(self.likelihood(), name)(y, *arguments).sum().backward()
            assert all(argument.grad.isfinite().all() for argument in arguments)

    def test_quadrature_equals_the_methods_in_use(self):
        # For a likelihood with closed forms this compares two computations; without, it is free.
        likelihood = self.likelihood()
        likelihood.n_points = self.N_POINTS
        y, mean, var = float64(self.targets(), MEANS, np.full(4, 0.3))
        pairs = [
            (likelihood.expected_log_prob(y, mean, var), Likelihood._expected_log_prob),
            (likelihood.log_predictive(y, mean, var), Likelihood._log_predictive),
        ]
        for value, default in pairs:
            default_value = default(likelihood, y, mean, var)
            torch.testing.assert_close(value, default_value, rtol=0, atol=self.TOLERANCE)
        moments = Likelihood._predictive_moments(likelihood, mean, var)
        for value, default_value in zip(
            likelihood.predictive_moments(mean, var), moments, strict=True
        ):
            torch.testing.assert_close(value, default_value, rtol=self.TOLERANCE, atol=1e-12)

    def test_jensen_orders_the_two_expectations(self):
        y, mean, var = float64(self.targets(), MEANS, np.full(4, 0.8))
        likelihood = self.likelihood()
        gap = likelihood.log_predictive(y, mean, var) - likelihood.expected_log_prob(y, mean, var)
        assert (gap > 0).all()

    # --- gradients ------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["log_prob", "expected_log_prob", "log_predictive"])
    def test_gradients_equal_finite_differences(self, name):
        parameters = self.parameters()
        y, *latent = float64(self.targets(), MEANS, [0.2, 0.5, 1.0, 2.0])
        latent = latent[:1] if name == "log_prob" else latent

        def value(*leaves):
            likelihood = self.differentiable_likelihood(list(leaves[len(latent) :]))
            return getattr(likelihood, name)(y, *leaves[: len(latent)])

        leaves = [leaf.clone().requires_grad_() for leaf in [*latent, *parameters]]
        assert torch.autograd.gradcheck(value, leaves, eps=1e-6, atol=1e-7, rtol=1e-6)

    def test_moment_gradients_equal_finite_differences(self):
        parameters = self.parameters()
        mean, var = float64(MEANS, [0.2, 0.5, 1.0, 2.0])

        def value(mean, var, *leaves):
            return self.differentiable_likelihood(list(leaves)).predictive_moments(mean, var)

        leaves = [leaf.clone().requires_grad_() for leaf in [mean, var, *parameters]]
        assert torch.autograd.gradcheck(value, leaves, eps=1e-6, atol=1e-6, rtol=1e-6)

    # --- integration rules ----------------------------------------------------------------------

    def _fine_integrals(self):
        """Cases (y, mean, var) with nodes f and weights of a fine rule against N(mean, var)."""
        # Latin: every target meets every variance, and the means shift along.
        cases = [
            (MEANS[(i + j) % 4], var, y)
            for j, var in enumerate(self.VARIANCES)
            for i, y in enumerate(self.targets())
        ]
        for mean, var, y in cases:
            std = np.sqrt(var)
            edges = np.linspace(mean - 12 * std, mean + 12 * std, 49)
            kinks = [b for b in self.breaks(y) if edges[0] < b < edges[-1]]
            f, weights = fine_grid.panels(np.sort(np.append(edges, kinks)))
            weights = weights * np.exp(-0.5 * (f - mean) ** 2 / var) / np.sqrt(2 * np.pi * var)
            yield y, mean, var, f, weights

    def _rule_over_y(self, f):
        support = self.support(f)
        return (support, np.ones(len(support))) if self.DISCRETE else fine_grid.panels(support)

    def _raw_moments(self, f):
        """E[y | f] and E[y^2 | f] for each f, summed or integrated over y."""
        y, weights = np.stack([self._rule_over_y(value) for value in f], axis=1)
        values = np.repeat(np.asarray(f)[:, None], y.shape[1], axis=1)
        probability = weights * np.exp(self.likelihood()._log_prob(*float64(y, values)).numpy())
        return (probability * y).sum(1), (probability * y**2).sum(1)


def float64(*arrays):
    """Tensors of double precision."""
    return tuple(torch.as_tensor(np.asarray(array, dtype=np.float64)) for array in arrays)

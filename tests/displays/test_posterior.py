"""Displays of a posterior over hyper-parameters: the arrays they compute, the artists they draw."""

import sys

import numpy as np
import pytest
from scipy import stats

from skgp.displays import PosteriorDisplay, TraceDisplay
from skgp.priors import Gamma, LogNormal
from skgp.samplers import r_hat

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

MEAN, SD = np.array([0.5, -2.0, 3.0]), np.array([0.1, 1.5, 0.2])


class Fitted:
    """Four chains of 250 draws each from a normal law of u, or weighted points of two rounds."""

    def __init__(self, sampler="hmc", n_chains=4):
        rng = np.random.default_rng(0)
        self.sampler_ = sampler
        self.posterior_samples_ = MEAN + SD * rng.normal(size=(250 * n_chains, 3))
        self.sample_chains_ = np.repeat(3 * np.arange(n_chains), 250)
        self.sample_weights_ = np.full(250 * n_chains, 1 / (250 * n_chains))
        self.hyperparameter_names_ = ["amplitude", "length_scale", "noise_level"]
        self.map_ = MEAN + 0.01
        self.priors_ = (LogNormal(1.0), Gamma(2.0, 1.0), LogNormal(0.1))
        if sampler == "importance":
            # Points twice as wide as the law that their weights make of them.
            self.posterior_samples_ = MEAN + 2 * (self.posterior_samples_ - MEAN)
            z = (self.posterior_samples_ - MEAN) / SD
            weights = np.exp(-0.5 * (1 - 1 / 4) * (z**2).sum(1))
            self.sample_weights_ = weights / weights.sum()


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def kernel_estimate(grid, u, weights):
    """Weighted mean of normal densities, their width by Scott's rule."""
    spread = np.sqrt(np.cov(u, aweights=weights))
    width = spread * np.sum(weights**2) ** 0.2
    return stats.norm.pdf(grid[:, None], u, width) @ weights


@pytest.mark.parametrize("sampler", ["hmc", "importance"])
def test_posterior_density_is_that_of_the_logarithm(sampler):
    fitted = Fitted(sampler)
    display = PosteriorDisplay.from_estimator(fitted)
    for j in range(3):
        u = np.log(display.x[j])
        estimate = kernel_estimate(u, fitted.posterior_samples_[:, j], fitted.sample_weights_)
        np.testing.assert_allclose(display.density[j], estimate, rtol=1e-6, atol=1e-12)
        exact = stats.norm.pdf(u, MEAN[j], SD[j])
        assert np.abs(display.density[j] - exact).max() < 0.25 * exact.max()
        prior = fitted.priors_[j]
        np.testing.assert_allclose(display.prior_density[j], np.exp(prior.log_density(u)))


def test_posterior_draws_what_it_holds():
    figure, axes = plt.subplots(1, 2)
    display = PosteriorDisplay.from_estimator(
        Fitted(),
        names=["noise_level", "amplitude"],
        grid_resolution=30,
        ax=axes,
        line_kwargs={"color": "red"},
        mode_kwargs={"label": "mode"},
    )
    assert display.figure_ is figure and list(display.axes_) == list(axes)
    np.testing.assert_array_equal(display.lines_[0].get_ydata(), display.density[0])
    np.testing.assert_array_equal(display.prior_lines_[1].get_ydata(), display.prior_density[1])
    assert display.mode_lines_[0].get_xdata()[0] == pytest.approx(np.exp(MEAN[2] + 0.01))
    assert display.lines_[0].get_color() == "red" and len(display.x[0]) == 30
    assert axes[0].get_xlabel() == "noise_level" and axes[0].get_xscale() == "log"
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == [
        "posterior",
        "prior",
        "mode",
    ]


def test_posterior_without_priors_and_mode_draws_densities_alone():
    fitted = Fitted()
    fitted.priors_ = ()
    display = PosteriorDisplay.from_estimator(fitted)
    assert display.prior_density is None and display.prior_lines_ == []
    bare = PosteriorDisplay(display.x, display.density, display.names).plot()
    assert bare.mode_lines_ == [] and len(bare.lines_) == 3


def test_trace_has_a_line_a_chain_and_its_r_hat():
    fitted = Fitted()
    display = TraceDisplay.from_estimator(fitted, linewidth=2)
    chains = fitted.posterior_samples_.reshape(4, 250, 3)
    for j, lines in enumerate(display.lines_):
        for chain, line in zip(chains, lines, strict=True):
            np.testing.assert_array_equal(line.get_ydata(), np.exp(chain[:, j]))
            assert line.get_linewidth() == 2
        assert display.r_hat[j] == pytest.approx(r_hat(chains[:, :, j]))
        assert display.axes_[j].get_title() == f"R-hat {display.r_hat[j]:.3f}"
        assert display.axes_[j].get_yscale() == "log"


def test_trace_of_chains_of_unequal_length():
    fitted = Fitted()
    for name in ("posterior_samples_", "sample_chains_", "sample_weights_"):
        setattr(fitted, name, getattr(fitted, name)[:-100])
    display = TraceDisplay.from_estimator(fitted, names=["length_scale"])
    assert [len(line.get_xdata()) for line in display.lines_[0]] == [250, 250, 250, 150]
    assert np.isfinite(display.r_hat).all() and len(display.axes_) == 1


def test_trace_of_importance_sampling_shows_rounds_and_weights():
    fitted = Fitted("importance", n_chains=2)
    display = TraceDisplay.from_estimator(fitted)
    assert display.r_hat is None
    first, second = display.lines_[0]
    np.testing.assert_array_equal(second.get_offsets()[:, 0], 250 + np.arange(250))
    sizes = np.concatenate([first.get_sizes(), second.get_sizes()])
    np.testing.assert_allclose(sizes, 4 * 500 * fitted.sample_weights_)


@pytest.mark.parametrize("display", [PosteriorDisplay, TraceDisplay])
def test_errors_say_what_to_do(display, monkeypatch):
    with pytest.raises(TypeError, match="BayesianGPRegressor"):
        display.from_estimator(object())
    with pytest.raises(ValueError, match="'beta'.*amplitude, length_scale"):
        display.from_estimator(Fitted(), names=["beta"])
    with pytest.raises(ValueError, match="2 axes for 3 panels"):
        display.from_estimator(Fitted(), ax=plt.subplots(1, 2)[1])
    single = Fitted()
    single.posterior_samples_ = single.posterior_samples_[:1]
    with pytest.raises(ValueError, match="optimizer='auto'"):
        display.from_estimator(single)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"skgp\[plot\]"):
        display.from_estimator(Fitted())

"""What a fitted mixture over hyper-parameters says of them and predicts."""

import copy

import numpy as np
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._fitting import in_few_threads
from skgp.estimators._posterior_summary import PosteriorSummary, inference_data, summarise
from skgp.inference.mixture.gaussian_mixture import mixture_log_density, mixture_quantiles
from skgp.inference.mixture.mixture import MixtureState


class MixturePredictive:
    """Predictions of a `MixtureState`, and the description of the samples that it came from.

    Attributes
    ----------
    _state : MixtureState
        In the standardised scale.
    """

    _state: MixtureState

    # ---- the posterior ---------------------------------------------------------------------

    def summary(self) -> PosteriorSummary:
        """Mean, standard deviation, quantiles and diagnostics of each hyper-parameter.

        Returns
        -------
        PosteriorSummary
            In the units of the hyper-parameters; prints as a table, and ``to_frame()`` makes a
            ``pandas.DataFrame`` of it.
        """
        check_is_fitted(self)
        return summarise(
            self.hyperparameter_names_,
            self.posterior_samples_,
            self.sample_weights_,
            self.sample_chains_,
            self.sampler_,
        )

    def to_arviz(self):
        """Return the samples as an ``arviz.InferenceData``, in the units of the hyper-parameters.

        Those of "importance" are resampled to as many of equal weight as they are worth, as four
        chains of independent draws.

        Raises
        ------
        ImportError
            If arviz is not installed.
        """
        check_is_fitted(self)
        return inference_data(
            self.kernel_,
            self.hyperparameter_names_,
            self.posterior_samples_,
            self.sample_weights_,
            self.sample_chains_,
            self.sampler_,
        )

    @in_few_threads
    def plug_in(self):
        """Return a fitted copy that predicts with the optimum ``map_`` alone, for comparison.

        Costs one solution with the kernel matrix.
        """
        check_is_fitted(self)
        other = copy.copy(self)
        other.kernel_ = self.kernel_.clone_with_theta(self.map_)
        other._state = self._state.at(self.kernel_, self.map_)
        other._noise_variance = float(other._state.noise[0])
        other.posterior_samples_, other.sample_weights_ = self.map_[None], np.ones(1)
        other.sample_chains_, other.sample_log_posterior_ = np.zeros(1, int), np.full(1, np.nan)
        other.n_kept_, other.sampler_ = 1, "map"
        other.diagnostics_ = {"sampler": "map", "converged": True, "problems": [], "ess": 1.0}
        at_map = self.diagnostics_.get("log_posterior_map")
        if at_map is not None and hasattr(self, "log_marginal_likelihood_value_"):
            priors = zip(self.priors_, self.map_, strict=True)
            log_prior = sum(float(prior.log_density(u)) for prior, u in priors)
            other.log_marginal_likelihood_value_ = at_map - log_prior
        return other

    # ---- prediction, in the standardised scale -----------------------------------------------

    @property
    def _n_threads(self):
        return None  # of ``n_jobs``, which are of joblib

    def _bytes_per_row(self):
        return 64 * self._state.n_samples

    def _latent_mean(self, X):
        return self._state.mean(X)

    def _latent_mean_and_variance(self, X):
        return self._state.moments(X)

    def _latent_mean_and_covariance(self, X):
        return self._state.covariance(X)

    def _latent_samples(self, X, n_samples, rng):
        return self._state.draws(X, n_samples, rng)

    def _observation_samples(self, X, n_samples, rng):
        return self._state.draws(X, n_samples, rng, noise=True)

    def _quantiles(self, X, levels):
        return self._by_chunks(lambda rows: mixture_quantiles(*self._components(rows), levels), X)

    def _log_density(self, X, z):
        return self._by_chunks(
            lambda rows: mixture_log_density(*self._components(rows[:, :-1]), rows[:, -1]),
            np.column_stack([X, z]),
        )

    def _components(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights (S,), means and variances (S, n) of z under each sample."""
        mean, var = self._state.component_moments(X)
        return self._state.weights, mean, var + self._state.noise[:, None]

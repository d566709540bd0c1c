r"""How many samples of the hyper-parameters predictions need.

S equally weighted samples give the moments of the mixture up to

.. math:: \frac{\mathrm{sd}(\hat m)}{\sigma} = \sqrt{\frac{V_s[m_s]}{S \sigma^2}}, \qquad
          \frac{\mathrm{sd}(\hat \sigma)}{\sigma}
          = \frac{1}{2 \sigma^2} \sqrt{\frac{V_s[v_s + (m_s - m)^2]}{S}},

with :math:`m_s, v_s` the moments of an observation under each sample and :math:`m, \sigma^2` those
of the mixture. The variances come from some samples of a pilot, at rows among the training rows and
beside them.
"""

import math

import numpy as np

from skgp.inference.mixture.gaussian_mixture import mixture_moments
from skgp.inference.mixture.mixture import MixtureState

__all__ = ["PILOT_SAMPLES", "probe_rows", "samples_needed"]

PILOT_SAMPLES = 12
_LEAST_SAMPLES, _MOST_SAMPLES = 8, 64
_MEAN_TOL, _STD_TOL = 0.03, 0.02  # relative to the standard deviation of an observation
_PROBES = 32  # rows of each sort


def probe_rows(X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Points half way between pairs of rows of X (n, d), and rows with their columns shuffled."""
    pairs = rng.integers(len(X), size=(2, _PROBES))
    shuffled = [column[rng.integers(len(X), size=_PROBES)] for column in X.T]
    return np.concatenate([X[pairs].mean(axis=0), np.column_stack(shuffled)])


def samples_needed(pilot: MixtureState, X: np.ndarray) -> int:
    """Samples that predict to 0.03 standard deviations and 2% of these at X, from 8 to 64.

    Root mean squares over the rows of X.

    Parameters
    ----------
    pilot : MixtureState
        Of some samples.
    X : ndarray of shape (t, d)
    """
    mean, var = pilot.component_moments(X)
    var = var + pilot.noise[:, None]
    centre, total = mixture_moments(pilot.weights, mean, var)
    spread = pilot.weights @ (mean - centre) ** 2
    energies = var + (mean - centre) ** 2
    uneven = pilot.weights @ (energies - total) ** 2
    of_mean = np.mean(spread / total) / _MEAN_TOL**2
    of_std = np.mean(uneven / (4 * total**2)) / _STD_TOL**2
    # The pilot's own variances are low by one of its effective samples.
    worth = 1 / float((pilot.weights**2).sum())
    needed = max(of_mean, of_std) * worth / max(1.0, worth - 1)
    return int(np.clip(math.ceil(needed), _LEAST_SAMPLES, _MOST_SAMPLES))

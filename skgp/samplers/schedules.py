r"""Step sizes of stochastic gradient Langevin dynamics, and when its steps are small enough.

References
----------
.. [1] Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics.
.. [2] Filippone and Engler (2015), Enabling scalable stochastic gradient-based inference for
   Gaussian processes by employing the Unbiased LInear System SolvEr (ULISSE).
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["ConstantSchedule", "PowerSchedule", "noise_ratio"]


@dataclass(frozen=True)
class ConstantSchedule:
    """The same step at all times.

    Parameters
    ----------
    step_size : float
    """

    step_size: float

    def __call__(self, t: int) -> float:
        """Step of iteration t, counted from 1."""
        return self.step_size


@dataclass(frozen=True)
class PowerSchedule:
    r"""Falling steps :math:`\varepsilon_t = a (b + t)^{-\gamma}` [1]_.

    Parameters
    ----------
    a, b, gamma : float
        Of exponents above 1/2 and at most 1, the squares of the steps have a finite sum and the
        steps an infinite one: [2]_, equation (6).

    Examples
    --------
    >>> schedule = PowerSchedule.between(0.1, 0.001, 1000)
    >>> [round(schedule(t), 6) for t in (1, 1000)]
    [0.1, 0.001]
    """

    a: float
    b: float
    gamma: float = 1.0

    @classmethod
    def between(
        cls, first: float, last: float, n_iterations: int, gamma: float = 1.0
    ) -> "PowerSchedule":
        """The schedule with given steps at iterations 1 and `n_iterations`.

        Parameters
        ----------
        first, last : float
            Positive, the last below the first.
        n_iterations : int
            At least 2.
        gamma : float, default=1

        Raises
        ------
        ValueError
            If the steps do not fall or there are fewer than two.
        """
        if not (0 < last < first and n_iterations >= 2 and gamma > 0):
            raise ValueError(
                "steps must be positive and fall over at least 2 iterations, gamma positive; got "
                f"first={first}, last={last}, n_iterations={n_iterations}, gamma={gamma}."
            )
        ratio = (first / last) ** (1 / gamma)  # (b + n) / (b + 1)
        offset = (n_iterations - 1) / (ratio - 1)  # b + 1
        return cls(first * offset**gamma, offset - 1, gamma)

    def __call__(self, t: int) -> float:
        """Step of iteration t, counted from 1."""
        return self.a * (self.b + t) ** -self.gamma


def noise_ratio(step_size: float, preconditioner: np.ndarray, covariance: np.ndarray) -> float:
    r"""Variance of the gradient's noise over that of the injected noise: [2]_, equation (7).

    .. math:: \frac{\varepsilon}{4} \lambda_{\max}(M^{1/2} V M^{1/2})

    Parameters
    ----------
    step_size : float
    preconditioner : ndarray of shape (p, p)
        M, positive definite.
    covariance : ndarray of shape (p, p)
        V, of the stochastic gradients.

    Returns
    -------
    float
        In a step :math:`\frac\varepsilon2 M \hat g + N(0, \varepsilon M)`, along the worst
        direction. Small where Langevin dynamics prevails.
    """
    root = np.linalg.cholesky(preconditioner)  # the eigenvalues are those of any root's product
    return step_size / 4 * float(np.linalg.eigvalsh(root.T @ covariance @ root)[-1])

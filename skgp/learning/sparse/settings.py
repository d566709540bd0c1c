"""How long, and on which rows, a sparse model is searched for."""

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How long and on which rows to search.

    Attributes
    ----------
    start_iter : int
        Iterations of the start, by the evidence bound.
    max_iter : int
        Iterations of the objective; steps, with minibatches.
    tol : float
        Relative fall of the objective an iteration below which a search stops.
    early_stopping : bool
        Whether rows are held out of a joint search.
    validation_fraction : float
    joint : bool
        Whether the objective moves hyper-parameters.
    batch_size : int or None
        Rows of a minibatch; None takes all rows up to 1e6 / M (1e7 / M for q alone), and chooses
        beyond.
    learning_rate : float or None
        Of minibatches; None for the default.
    dense_start : bool
        Whether the start may learn hyper-parameters by the evidence of a dense Gaussian process,
        O(n^3) an iteration, in place of the bound: for few rows, as many inducing points.
    ratio_std : float or None
        Standard deviation a priori of the log ratios of length scales in such a start, around those
        of the kernels; None is without a prior.
    exact : bool
        Whether the fit is that of a dense Gaussian process (:mod:`skgp.learning.sparse.exact`).
    sizes : tuple of int
        Numbers of inducing points, beyond those of the start, that may be tried in this order
        (:mod:`skgp.learning.sparse.size`).
    """

    start_iter: int = 100
    max_iter: int = 200
    tol: float = 1e-6
    early_stopping: bool = True
    validation_fraction: float = 0.1
    joint: bool = True
    batch_size: int | None = None
    learning_rate: float | None = None
    dense_start: bool = False
    ratio_std: float | None = None
    exact: bool = False
    sizes: tuple[int, ...] = ()

"""Early stopping of the stochastic solver by rows held out and scored from the running weights."""

import math

import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.prediction import product
from skgp.inference.stochastic.state import SGDState
from skgp.learning import held_out_rows
from skgp.optim import ValidationPlateau

__all__ = ["EVERY", "HeldOutScore", "hold_out", "validation_rule"]

EVERY = 50  # iterations between two scores: a score takes the time of a few iterations
PATIENCE = 5  # scores without a rise
MAX_ROWS = 1_000  # more would make a score dearer, and are of better use in the training

Rows = tuple[Tensor, Tensor]


def hold_out(X: Tensor, y: Tensor, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Split rows into those to train on and those to score, stratified by y.

    Parameters
    ----------
    X : Tensor of shape (n, d)
    y : Tensor of shape (n,)
    fraction : float
        To hold out, rounded up, but at most 1000 rows.
    seed : int
        Equal seeds hold the same rows out, so that a warm start scores rows it never trained on.

    Returns
    -------
    training, held_out : tuple of two Tensors
        Copies, in the order of X.

    Raises
    ------
    ValueError
        If nothing is left to train on.
    """
    n = X.shape[0]
    size = min(math.ceil(fraction * n), MAX_ROWS)
    if size >= n:
        raise ValueError(
            f"validation_fraction={fraction} of {n} rows leaves none to train on. Lower it, give "
            "more rows, or set early_stopping=False."
        )
    held = torch.from_numpy(held_out_rows(y, size, torch.Generator().manual_seed(seed)))
    held = held.to(X.device)
    return (X[~held], y[~held]), (X[held], y[held])


class HeldOutScore:
    """Minus the mean squared error of the running mean on held-out rows: greater is better.

    Parameters
    ----------
    basis : StochasticBasis
    state : SGDState
        Of the fit that goes on: read anew at every call. ``O(n_held m)`` a call.
    X, y : Tensor of shape (n_held, d) and (n_held,)
    """

    def __init__(self, basis: StochasticBasis, state: SGDState, X: Tensor, y: Tensor) -> None:
        self.basis, self.state = basis, state
        self.X, self.y = X.to(basis.dtype), y

    def __call__(self) -> float:
        """Evaluate the current weights and hyper-parameters."""
        state = self.state
        mean = product(self.basis, self.X, state.weights[:, :1], state.theta)[:, 0]
        return -float((self.y - mean).square().mean())


def validation_rule(
    basis: StochasticBasis, state: SGDState, held_out: Rows, tol: float | None
) -> ValidationPlateau:
    """Make the rule that stops once the error has not fallen for five scores, 50 iterations apart.

    Parameters
    ----------
    basis : StochasticBasis
    state : SGDState
    held_out : tuple of two Tensors
    tol : float or None
        Least fall, relative to the whole fall so far; 1e-3 for None.
    """
    return ValidationPlateau(
        HeldOutScore(basis, state, *held_out),
        every=EVERY,
        patience=PATIENCE,
        tol=1e-3 if tol is None else tol,
    )

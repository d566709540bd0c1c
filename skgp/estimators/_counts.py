"""Counts as targets: what is accepted."""

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from skgp.kernels import split_noise

_ADVICE = {
    "missing": "Drop or impute such rows.",
    "negative": "Correct or drop such rows, or take a likelihood for real numbers.",
    "fractional": "Round them if they are counts (a rate times its exposure is one), or take a "
    "likelihood for real numbers.",
}


def check_counts(y: np.ndarray, name: str = "y") -> None:
    """Refuse what is not a count: a whole number of at least 0.

    Parameters
    ----------
    y : ndarray of shape (n,)
        Numbers of any dtype; whole ones may be floats.
    name : str, default="y"
        What the message calls it.

    Raises
    ------
    ValueError
        If there is NaN or infinity, a negative or a fractional number; names the first of them, its
        row, and the remedy.
    """
    missing, negative = ~np.isfinite(y), y < 0
    bad = missing | negative | (y != np.rint(y))
    if not bad.any():
        return
    row = int(bad.argmax())
    kind = "missing" if missing[row] else "negative" if negative[row] else "fractional"
    raise ValueError(
        f"{name} must hold counts, whole numbers of at least 0; got {y[row].item()!r} in row {row} "
        f"({bad.sum()} of {len(y)} rows hold no count). {_ADVICE[kind]}"
    )


def refuse_noise(kernel: Kernel, owner: object) -> None:
    """Refuse a WhiteKernel summand in the kernel of a regressor of counts.

    Parameters
    ----------
    kernel : Kernel
    owner : object
        The estimator, for the message.

    Raises
    ------
    ValueError
        If there is one at the top level.
    """
    if split_noise(kernel)[1] is not None:
        raise ValueError(
            f"kernel={kernel} has a WhiteKernel, which is the noise of a Gaussian likelihood; "
            f"the counts of {type(owner).__name__} have none. Leave the WhiteKernel out."
        )


def offset_of_mean(mean: float, link: str) -> float:
    """Return the latent value at which the rate of counts is `mean`.

    Parameters
    ----------
    mean : float
        Positive, of any magnitude.
    link : {"exp", "softplus"}
    """
    # log(e^m - 1) without the overflow.
    return float(np.log(mean)) if link == "exp" else float(mean + np.log(-np.expm1(-mean)))

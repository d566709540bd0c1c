"""Counts as targets: what is accepted."""

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from skgp.kernels import split_noise

_ADVICE = {
    "missing": "Drop or impute such rows.",
    "negative": "Correct or drop such rows, or take a likelihood for real numbers.",
    "fractional": "Round them if they are counts, give the counts of rates with their exposure, or "
    "take a likelihood for real numbers.",
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


def check_exposure(exposure, n_rows: int, owner: object) -> np.ndarray | None:
    """Logarithms of the exposures of counts: what is added to their log-rates.

    Parameters
    ----------
    exposure : float, array-like of shape (n,) or None
    n_rows : int
        n.
    owner : object
        The estimator: its parameter ``likelihood`` says whether it has counts.

    Returns
    -------
    ndarray of shape (n,), or None

    Raises
    ------
    ValueError
        If there are exposures and no counts, or if they are not one a row, positive and finite.
    """
    if exposure is None:
        return None
    likelihood = getattr(owner, "likelihood", "gaussian")
    if likelihood != "poisson":
        raise ValueError(
            f"exposure is the time, area or population that a count is of, and needs "
            f"likelihood='poisson'; got likelihood={likelihood!r} of {type(owner).__name__}. "
            "Leave exposure out, or take DLMGPRegressor, SWSGPRegressor or StateSpaceGPRegressor "
            "with likelihood='poisson'."
        )
    values = np.asarray(exposure, dtype=np.float64)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim > 1 or (values.ndim == 1 and len(values) != n_rows):
        raise ValueError(
            f"exposure must be a number or one for each of the {n_rows} rows of X; got an array of "
            f"shape {values.shape}."
        )
    values = np.broadcast_to(values, n_rows)
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"exposure must be positive and finite; got {values[row].item()!r} in row {row}. A row "
            "without exposure has no count: leave it out, or give it sample_weight 0."
        )
    return np.log(values)


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

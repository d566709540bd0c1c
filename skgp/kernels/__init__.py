"""A scikit-learn kernel expression as Gram matrix, spectral density or state-space model."""

from .expression import check_kernel, register_kernel, split_noise, split_theta, stationary
from .gram import gram, gram_diag, gram_tile
from .sde import StateSpace, has_state_space, state_space
from .specs import SHO, ActiveDims, Cosine, LocalLinearTrend
from .spectra import has_spectral_density
from .spectral import FourierFeatures

__all__ = [
    "ActiveDims",
    "Cosine",
    "FourierFeatures",
    "LocalLinearTrend",
    "SHO",
    "StateSpace",
    "check_kernel",
    "gram",
    "gram_diag",
    "gram_tile",
    "has_spectral_density",
    "has_state_space",
    "register_kernel",
    "split_noise",
    "split_theta",
    "state_space",
    "stationary",
]

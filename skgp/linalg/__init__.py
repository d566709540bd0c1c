"""Linear algebra on tensors and matvec closures; no Gaussian-process words."""

__all__ = ["NotPositiveDefiniteError", "NumericalWarning"]


class NotPositiveDefiniteError(ValueError):
    """A matrix that must be positive definite is not, even after the largest jitter allowed."""


class NumericalWarning(UserWarning):
    """A result is usable but less accurate than asked for; the message says by how much and why."""

"""How a sparse-within-sparse GP is fitted."""

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How to fit.

    Attributes
    ----------
    n_neighbors : int
        H; all inducing points where there are fewer.
    kl_weight : float or None
        None is M / H, or less where the noise is not Gaussian and predictions gain.
    covariance : {"diagonal", "full"}
        Of q(u).
    learn_inducing : bool
        Whether the inducing points move.
    polish_inducing : bool
        Whether they do in a polish in any case.
    learn_hyperparameters : bool
        Whether anything of the kernel or the likelihood may change.
    neighbors : {"auto", "exact", "faiss"}
    solver : {"auto", "natural", "adam"}
        "adam" is Algorithm 1, "natural" step 3; "auto" takes that where it applies.
    polish : bool
    max_iter : int or None
        Natural-gradient steps, 14 by default, or steps of Adam: by default until the bound stands
        still, 6000 at most, and 400 of a polish.
    tol : float
        Relative change of the bound at which the former stop.
    learning_rate : float or None
        Of Adam.
    batch_size : int
        Likewise.
    validation_fraction : float
        Of the rows held out in steps 2 and 4: at most 4000, and no fewer than 500 or a third.
    """

    n_neighbors: int = 32
    kl_weight: float | None = None
    covariance: str = "diagonal"
    learn_inducing: bool = False
    polish_inducing: bool = False
    learn_hyperparameters: bool = True
    neighbors: str = "auto"
    solver: str = "auto"
    polish: bool = False
    max_iter: int | None = None
    tol: float = 1e-4
    learning_rate: float | None = None
    batch_size: int = 256
    validation_fraction: float = 0.1

    @property
    def moves_inducing(self) -> bool:
        """Whether steps of Adam come after the natural ones in any case."""
        return self.solver == "adam" or self.learn_inducing

    @property
    def polishes_inducing(self) -> bool:
        """Whether a polish moves the inducing points."""
        return self.learn_inducing or self.polish_inducing

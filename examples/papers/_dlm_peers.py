"""What DLM is measured against: sparse GPs of gpytorch, and count regressors of scikit-learn.

`SGPR` and `SVGP` standardise inputs and targets by the training part, as users of gpytorch do, and
answer in the units of y. They need gpytorch, which ``pip install skgp[bench]`` brings. Threads are
those of torch: whoever compares sets ``OMP_NUM_THREADS`` for all. Seconds are the processor's, of
all threads together: those of one thread are what the clock shows on an idle machine.

The settings (:data:`KMEANS_ROWS`, ``initial_length_scale``, ``dtype``, the decay of the learning
rate) were chosen on training rows of kin40k held out, not on its test rows.
"""

import importlib
import time
from typing import Any

import numpy as np
import torch
from sklearn.cluster import MiniBatchKMeans
from sklearn.preprocessing import StandardScaler

KMEANS_ROWS = 20_000  # more of them move the centres little
_TEST_ROWS = 4096  # predicted at a time


def import_gpytorch() -> Any:
    """The package, or an ImportError that says how to get it."""
    try:
        return importlib.import_module("gpytorch")
    except ImportError as error:
        raise ImportError(
            "the peers SGPR and SVGP need gpytorch; install it with `pip install skgp[bench]`"
        ) from error


class _Peer:
    """Standardises, picks the first inducing points, times the fit; a subclass trains."""

    n_inducing: int
    ard: bool
    initial_length_scale: float | None
    dtype: str
    random_state: int

    def fit(self, X: np.ndarray, y: np.ndarray) -> "_Peer":
        """Train on rows X (n, d) and targets y (n,), in any units."""
        start = time.process_time()
        self._inputs = StandardScaler().fit(X)
        self._mean, self._scale = float(y.mean()), float(y.std())
        rows = self._tensor(self._inputs.transform(X))
        targets = self._tensor((y - self._mean) / self._scale)
        generator = torch.Generator().manual_seed(self.random_state)
        self._train(rows, targets, generator)
        self.fit_seconds_ = time.process_time() - start
        return self

    def predict(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation (n,) of a new observation, in the units of y."""
        gpytorch = import_gpytorch()
        self._model.eval()
        self._likelihood.eval()
        means, variances = [], []
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances(False):
            for part in self._tensor(self._inputs.transform(X)).split(_TEST_ROWS):
                law = self._likelihood(self._model(part))
                means.append(law.mean)
                variances.append(law.variance)
        mean = torch.cat(means).double().numpy()
        std = torch.cat(variances).double().sqrt().numpy()
        return self._mean + self._scale * mean, self._scale * std

    def _train(self, X: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> None:
        raise NotImplementedError

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=getattr(torch, self.dtype))

    def _kernel(self, d: int) -> Any:
        """Scaled RBF kernel; its first length scale is gpytorch's own unless one is given."""
        kernels = import_gpytorch().kernels
        shape = kernels.RBFKernel(ard_num_dims=d if self.ard else None)
        if self.initial_length_scale is not None:
            shape.lengthscale = self.initial_length_scale
        return kernels.ScaleKernel(shape)

    def _centres(self, X: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Centres of clusters, (n_inducing, d)."""
        rows = X[torch.randperm(len(X), generator=generator)[:KMEANS_ROWS]].numpy()
        clusters = MiniBatchKMeans(
            min(self.n_inducing, len(rows)), n_init=1, batch_size=4096, random_state=0
        ).fit(rows)
        return self._tensor(clusters.cluster_centers_)


class SGPR(_Peer):
    """Titsias' collapsed bound by Adam, inducing points learned (``InducingPointKernel``).

    Parameters
    ----------
    n_inducing : int
    n_steps : int
        Of Adam on all rows.
    learning_rate : float
    ard : bool
        One length scale a column, or one for all.
    initial_length_scale : float, optional
        Where inputs are standardised; None is gpytorch's 0.69.
    dtype : str
    random_state : int
    """

    def __init__(
        self,
        n_inducing: int = 200,
        *,
        n_steps: int = 60,
        learning_rate: float = 0.1,
        ard: bool = True,
        initial_length_scale: float | None = None,
        dtype: str = "float32",
        random_state: int = 0,
    ) -> None:
        self.n_inducing, self.n_steps, self.learning_rate = n_inducing, n_steps, learning_rate
        self.ard, self.initial_length_scale = ard, initial_length_scale
        self.dtype, self.random_state = dtype, random_state

    def _train(self, X: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> None:
        gpytorch = import_gpytorch()
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(X.dtype)
        kernel = gpytorch.kernels.InducingPointKernel(
            self._kernel(X.shape[1]), self._centres(X, generator), likelihood
        )

        class Model(gpytorch.models.ExactGP):
            def __init__(self) -> None:
                super().__init__(X, y, likelihood)
                self.mean, self.kernel = gpytorch.means.ConstantMean(), kernel

            def forward(self, x: torch.Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

        self._likelihood, self._model = likelihood, Model().to(X.dtype)
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self._model)
        optimizer = torch.optim.Adam(self._model.parameters(), lr=self.learning_rate)
        for _ in range(self.n_steps):
            optimizer.zero_grad()
            (-objective(self._model(X), y)).backward()
            optimizer.step()


class SVGP(_Peer):
    """Stochastic variational inference by Adam on minibatches, inducing points learned.

    Parameters
    ----------
    n_inducing : int
    objective : {"elbo", "predictive"}
        The second is the log-loss of the prediction itself (``PredictiveLogLikelihood``, the
        parametric GP regressor of Jankowiak et al., 2020), gpytorch's own relative of DLM.
    max_seconds, max_epochs : float, optional
        Whichever comes first ends the fit; clustering counts.
    learning_rate : float
        Falls to a tenth over the last third of the budget.
    batch_size : int
    ard, initial_length_scale, dtype, random_state
        As for `SGPR`.
    """

    def __init__(
        self,
        n_inducing: int = 200,
        *,
        objective: str = "elbo",
        max_seconds: float | None = None,
        max_epochs: float | None = None,
        learning_rate: float = 0.01,
        batch_size: int = 1024,
        ard: bool = True,
        initial_length_scale: float | None = None,
        dtype: str = "float32",
        random_state: int = 0,
    ) -> None:
        if max_seconds is None and max_epochs is None:
            raise ValueError("SVGP needs a budget; give max_seconds or max_epochs")
        self.n_inducing, self.objective = n_inducing, objective
        self.max_seconds, self.max_epochs = max_seconds, max_epochs
        self.learning_rate, self.batch_size = learning_rate, batch_size
        self.ard, self.initial_length_scale = ard, initial_length_scale
        self.dtype, self.random_state = dtype, random_state

    def _train(self, X: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> None:
        gpytorch = import_gpytorch()
        start = time.process_time()
        Z = self._centres(X, generator)
        kernel = self._kernel(X.shape[1])

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self) -> None:
                law = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
                super().__init__(gpytorch.variational.VariationalStrategy(self, Z, law))
                self.mean, self.kernel = gpytorch.means.ConstantMean(), kernel

            def forward(self, x: torch.Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

        self._likelihood = gpytorch.likelihoods.GaussianLikelihood().to(X.dtype)
        self._model = Model().to(X.dtype)
        self._model.train()
        losses = {
            "elbo": gpytorch.mlls.VariationalELBO,
            "predictive": gpytorch.mlls.PredictiveLogLikelihood,
        }
        objective = losses[self.objective](self._likelihood, self._model, num_data=len(X))
        parameters = [*self._model.parameters(), *self._likelihood.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        self.n_steps_ = 0
        while (spent := self._spent(time.process_time() - start, len(X))) < 1:
            for rows in torch.randperm(len(X), generator=generator).split(self.batch_size):
                optimizer.param_groups[0]["lr"] = self.learning_rate * _decay(spent)
                optimizer.zero_grad()
                (-objective(self._model(X[rows]), y[rows])).backward()
                optimizer.step()
                self.n_steps_ += 1
                spent = self._spent(time.process_time() - start, len(X))
                if spent >= 1:
                    break

    def _spent(self, seconds: float, n: int) -> float:
        """Share of the budget that is used up."""
        epochs = self.n_steps_ * min(self.batch_size, n) / n
        return max(
            seconds / self.max_seconds if self.max_seconds else 0.0,
            epochs / self.max_epochs if self.max_epochs else 0.0,
        )


def _decay(spent: float) -> float:
    """1 over two thirds of the budget, then down to a tenth."""
    return 10.0 ** -max(0.0, 3 * min(spent, 1.0) - 2)


def gaussian_scores(
    y: np.ndarray, mean: np.ndarray, std: np.ndarray, scale: float
) -> dict[str, float]:
    """RMSE and mean NLL (nats a row) in y's units, and with y over `scale`, its training spread."""
    nll = np.mean(0.5 * np.log(2 * np.pi * std**2) + 0.5 * ((y - mean) / std) ** 2)
    return scores_in_both_units(np.sqrt(np.mean((y - mean) ** 2)), nll, scale)


def scores_in_both_units(rmse: float, nll: float, scale: float) -> dict[str, float]:
    """The same figures as they are and for y / scale, where p(z) = scale p(y)."""
    return {
        "rmse": float(rmse),
        "nll": float(nll),
        "rmse_standardised": float(rmse / scale),
        "nll_standardised": float(nll - np.log(scale)),
    }


def mean_relative_error(y: np.ndarray, mean: np.ndarray) -> float:
    """Mean of ``|mean - y| / max(1, y)``: the MRE of the paper."""
    return float(np.mean(np.abs(mean - y) / np.maximum(1, y)))

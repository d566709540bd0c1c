"""What SWSGP is measured against: sparse GPs of gpytorch, local GPs, classifiers of scikit-learn.

`SVGP` and `NNVGP` need gpytorch, which ``pip install skgp[bench]`` brings. They standardise inputs
and targets by the training part and are scored in these units. Seconds are the processor's, of all
threads together: whoever compares sets ``OMP_NUM_THREADS`` for all. Scoring test rows on the way
(`Watch`) does not count.

Where gpytorch lacks faiss it looks up the neighbours of `NNVGP` by one scikit-learn index a row,
minutes for 36000 rows. :func:`preceding_neighbors` takes the place of that, in seconds.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from _dlm_peers import _decay, _Peer, import_gpytorch
from scipy.stats import norm
from sklearn.cluster import KMeans
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.neighbors import NearestNeighbors
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC

Scores = dict[str, float]
_LEAST_PROBABILITY = 1e-12
_TEST_ROWS = 1024  # predicted at a time
_SEARCH_ROWS = 2048  # whose distances to all others are in memory at once


class Clock:
    """Processor seconds since it was made, but for those spent `paused`."""

    def __init__(self) -> None:
        self._start = time.process_time()

    @property
    def seconds(self) -> float:
        return time.process_time() - self._start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = self.seconds
        yield
        self._start += self.seconds - before


@dataclass(frozen=True)
class Watch:
    """Test rows to score while a fit goes on.

    Attributes
    ----------
    X, y : ndarray of shapes (n, d) and (n,)
    every : float
        Seconds from one score to the next.
    loss, nll : float
        The fit ends when it has reached both.
    """

    X: np.ndarray
    y: np.ndarray
    every: float = 2.0
    loss: float = -math.inf
    nll: float = -math.inf

    def reached(self, scores: Scores) -> bool:
        return scores["loss"] <= self.loss and scores["nll"] <= self.nll


class _Minibatch(_Peer):
    """A variational GP by Adam on minibatches; a subclass says which.

    Parameters
    ----------
    likelihood : {"gaussian", "bernoulli"}
        For the latter (probit) y is 0 or 1.
    nu : float, optional
        Smoothness of a Matern kernel; None is an RBF kernel.
    max_seconds : float
        Budget of a fit.
    learning_rate : float
        Falls to a tenth over the last third of the budget.
    batch_size : int
    ard : bool
    standardise : bool
        Whether each column of the inputs is; not those of images.
    initial_length_scale : float, optional
        The square root of the number of columns by default.
    dtype : str
    random_state : int

    Attributes
    ----------
    trace_ : list of dict
        ``seconds``, ``loss`` and ``nll`` whenever the test rows were scored.
    reached_ : float
        Seconds after which a `Watch` had what it asked for; infinite if it never had.
    n_steps_ : int
    fit_seconds_ : float
    """

    def __init__(
        self,
        *,
        likelihood: str = "gaussian",
        nu: float | None = 2.5,
        max_seconds: float = 60.0,
        learning_rate: float = 0.03,
        batch_size: int = 256,
        ard: bool = True,
        standardise: bool = True,
        initial_length_scale: float | None = None,
        dtype: str = "float32",
        random_state: int = 0,
    ) -> None:
        self.likelihood, self.nu = likelihood, nu
        self.max_seconds, self.learning_rate = max_seconds, learning_rate
        self.batch_size, self.ard, self.dtype = batch_size, ard, dtype
        self.standardise, self.initial_length_scale = standardise, initial_length_scale
        self.random_state = random_state

    def _build(self, X: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Any:
        """The model for rows X and targets y."""
        raise NotImplementedError

    def _batches(self, generator: torch.Generator) -> Iterator[tuple[Any, torch.Tensor]]:
        """Endless pairs of the posterior of f at some rows and their targets."""
        raise NotImplementedError

    # ---- training ------------------------------------------------------------------------

    def fit(self, X: np.ndarray, y: np.ndarray, watch: Watch | None = None) -> "_Minibatch":
        """Train on rows X (n, d) and targets y (n,), in any units."""
        import_gpytorch()  # before the clock starts
        clock = Clock()
        scaler = StandardScaler() if self.standardise else FunctionTransformer()
        self._inputs = scaler.fit(X)
        self._mean, self._scale = 0.0, 1.0
        if self.likelihood == "gaussian":
            self._mean, self._scale = float(y.mean()), float(y.std())
        rows = self._tensor(self._inputs.transform(X))
        targets = self._tensor((y - self._mean) / self._scale)
        generator = torch.Generator().manual_seed(self.random_state)
        self.trace_: list[Scores] = []
        self.reached_, self.n_steps_ = math.inf, 0
        with torch.random.fork_rng():  # gpytorch draws from the global generator
            torch.manual_seed(self.random_state)
            self._model = self._build(rows, targets, generator).to(rows.dtype)
            self._train_for(clock, len(rows), generator, watch)
        self.fit_seconds_ = clock.seconds
        return self

    def _train_for(
        self, clock: Clock, n: int, generator: torch.Generator, watch: Watch | None
    ) -> None:
        """Adam until the budget is spent or the watch has what it asks for."""
        gpytorch = import_gpytorch()
        likelihoods = gpytorch.likelihoods
        gaussian = self.likelihood == "gaussian"
        self._likelihood = (
            likelihoods.GaussianLikelihood() if gaussian else likelihoods.BernoulliLikelihood()
        )
        self._likelihood.to(getattr(torch, self.dtype))
        bound = gpytorch.mlls.VariationalELBO(self._likelihood, self._model, num_data=n)
        parameters = [*self._model.parameters(), *self._likelihood.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        self._model.train()
        for law, targets in self._batches(generator):
            spent = clock.seconds / self.max_seconds
            optimizer.param_groups[0]["lr"] = self.learning_rate * _decay(spent)
            optimizer.zero_grad()
            (-bound(law, targets)).backward()
            optimizer.step()
            self.n_steps_ += 1
            due = watch is not None and clock.seconds >= watch.every * (len(self.trace_) + 1)
            if (due and self._note(watch, clock)) or spent >= 1:
                break

    def _note(self, watch: Watch, clock: Clock) -> bool:
        """Score the watched rows; whether they are as good as they are to be."""
        seconds = clock.seconds
        with clock.paused():
            scores = self.score(watch.X, watch.y)
            self._model.train()
            self._likelihood.train()
        self.trace_.append({"seconds": seconds, **scores})
        if watch.reached(scores):
            self.reached_ = seconds
        return self.reached_ < math.inf

    def _kernel(self, d: int) -> Any:
        """Scaled kernel for standardised inputs."""
        kernels = import_gpytorch().kernels
        n_scales = d if self.ard else None
        shape = (
            kernels.RBFKernel(ard_num_dims=n_scales)
            if self.nu is None
            else kernels.MaternKernel(nu=self.nu, ard_num_dims=n_scales)
        )
        given = self.initial_length_scale
        shape.lengthscale = math.sqrt(d) if given is None else given
        return kernels.ScaleKernel(shape)

    # ---- prediction ----------------------------------------------------------------------

    def latent(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (n,) of f, y standardised."""
        self._model.eval()
        rows = self._tensor(self._inputs.transform(X))
        with torch.no_grad():
            laws = [self._model(part) for part in rows.split(_TEST_ROWS)]
            mean = torch.cat([law.mean for law in laws])
            variance = torch.cat([law.variance for law in laws])
        return mean.double().numpy(), variance.double().numpy()

    def score(self, X: np.ndarray, y: np.ndarray) -> Scores:
        """RMSE or error rate, and mean NLL in nats; y standardised."""
        return self._scores(*self.latent(X), y)

    def _scores(self, mean: np.ndarray, variance: np.ndarray, y: np.ndarray) -> Scores:
        if self.likelihood == "bernoulli":
            return class_scores(y, norm.cdf(mean / np.sqrt(1 + variance)))
        std = np.sqrt(variance + float(self._likelihood.noise.detach()))
        return target_scores((y - self._mean) / self._scale, mean, std)


def _variational_gp(make_strategy: Callable[[Any], Any], kernel: Any) -> Any:
    """gpytorch's model of a constant mean, a kernel and a variational strategy."""
    gpytorch = import_gpytorch()

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            super().__init__(make_strategy(self))
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

        def forward(self, x: torch.Tensor) -> Any:
            covariance = self.covar_module(x)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)

    return Model()


class SVGP(_Minibatch):
    """M inducing points that are learned, whitened and with a full covariance.

    Parameters
    ----------
    n_inducing : int
    **params
        Those of `NNVGP`, but for n_neighbors.
    """

    def __init__(self, n_inducing: int = 512, **params: Any) -> None:
        super().__init__(**params)
        self.n_inducing = n_inducing

    def _build(self, X: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Any:
        self._rows, self._targets = X, y
        Z = self._centres(X, generator)

        def strategy(model: Any) -> Any:
            variational = import_gpytorch().variational
            law = variational.CholeskyVariationalDistribution(len(Z))
            return variational.VariationalStrategy(model, Z, law)

        return _variational_gp(strategy, self._kernel(X.shape[1]))

    def _batches(self, generator: torch.Generator) -> Iterator[tuple[Any, torch.Tensor]]:
        while True:
            order = torch.randperm(len(self._rows), generator=generator)
            for rows in order.split(self.batch_size):
                yield self._model(self._rows[rows]), self._targets[rows]

    def score_nearest(self, X: np.ndarray, y: np.ndarray, n_neighbors: int) -> Scores:
        """The same scores with each row predicted from its H nearest inducing points alone."""
        with torch.no_grad():
            rows = self._tensor(self._inputs.transform(X)).double()
            moments = [self._nearest(part, n_neighbors) for part in rows.split(_TEST_ROWS)]
        mean, variance = (torch.cat(parts).numpy() for parts in zip(*moments, strict=True))
        return self._scores(mean, variance, y)

    def _nearest(self, X: torch.Tensor, H: int) -> tuple[torch.Tensor, torch.Tensor]:
        """p(f | u_I) averaged over q(u_I), I the nearest of each row; eq. 13 of the paper."""
        Z, mean, S = self._unwhitened
        kernel, constant = self._model.covar_module, self._model.mean_module.constant.double()
        scale = kernel.base_kernel.lengthscale.double()
        active = torch.cdist(X / scale, Z / scale).topk(H, largest=False).indices
        points = Z[active]  # (n, H, d)
        K = kernel(points).to_dense() + 1e-4 * kernel.outputscale * torch.eye(H)
        cross = kernel(X[:, None], points).to_dense().squeeze(1)
        A = torch.linalg.solve(K, cross)
        block = S[active[:, :, None], active[:, None, :]]
        variance = (
            kernel.outputscale - (A * cross).sum(1) + torch.einsum("nh,nhk,nk->n", A, block, A)
        )
        return constant + (A * (mean[active] - constant)).sum(1), variance.clamp_min(1e-8)

    @property
    def _unwhitened(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inducing points, and mean and covariance of q(u)."""
        model = self._model.double().eval()
        Z = model.variational_strategy.inducing_points
        law = model.variational_strategy.variational_distribution
        K = model.covar_module(Z).to_dense() + 1e-4 * model.covar_module.outputscale * torch.eye(
            len(Z)
        )
        L = torch.linalg.cholesky(K)
        root = L @ torch.linalg.cholesky(law.covariance_matrix + 1e-10 * torch.eye(len(Z)))
        return Z, model.mean_module.constant + L @ law.mean, root @ root.T


class NNVGP(_Minibatch):
    """Inducing points at all rows, each conditioned on its k nearest predecessors.

    Wu, Pleiss and Cunningham (2022), Variational nearest neighbor Gaussian processes.

    Parameters
    ----------
    n_neighbors : int
    **params
        See `_Minibatch`.
    """

    def __init__(self, n_neighbors: int = 32, **params: Any) -> None:
        super().__init__(**params)
        self.n_neighbors = n_neighbors

    def _build(self, X: torch.Tensor, y: torch.Tensor, generator: torch.Generator) -> Any:
        order = torch.randperm(len(X), generator=generator)
        rows, self._targets = X[order], y[order]
        gpytorch = import_gpytorch()

        def strategy(model: Any) -> Any:
            variational = gpytorch.variational
            law = variational.MeanFieldVariationalDistribution(len(rows))
            sizes = self.n_neighbors, self.batch_size
            return variational.NNVariationalStrategy(model, rows, law, *sizes)

        util = gpytorch.utils.nearest_neighbors.NNUtil
        with mock.patch.object(util, "build_sequential_nn_idx", _sequential):
            return _variational_gp(strategy, self._kernel(X.shape[1]))

    def _batches(self, generator: torch.Generator) -> Iterator[tuple[Any, torch.Tensor]]:
        strategy = self._model.variational_strategy
        while True:
            law = self._model(None)  # at rows of its own choice
            yield law, self._targets[strategy.current_training_indices]


def _sequential(util: Any, X: torch.Tensor) -> torch.Tensor:
    return preceding_neighbors(X, util.k)


def preceding_neighbors(X: torch.Tensor, k: int) -> torch.Tensor:
    """The k nearest among the rows before it, of every row but the first k; shape (n - k, k)."""
    found = []
    for start in range(k, len(X), _SEARCH_ROWS):
        rows = torch.arange(start, min(start + _SEARCH_ROWS, len(X)))
        distance = torch.cdist(X[rows], X[: rows[-1] + 1])
        distance.masked_fill_(torch.arange(distance.shape[1]) >= rows[:, None], math.inf)
        found.append(distance.topk(k, largest=False).indices)
    return torch.cat(found)


class LocalGPs:
    """Exact GPs of some rows each, one for each cluster: table 3 of the paper.

    Parameters
    ----------
    transductive : bool
        Whether a test row is predicted from the rows nearest to it, with the hyper-parameters of
        the nearest expert (Urtasun and Darrell, 2008), and not from the expert's own rows (Kim et
        al., 2005).
    n_experts, n_rows : int
    random_state : int
    """

    def __init__(
        self,
        transductive: bool = False,
        *,
        n_experts: int = 64,
        n_rows: int = 100,
        random_state: int = 0,
    ) -> None:
        self.transductive, self.n_experts, self.n_rows = transductive, n_experts, n_rows
        self.random_state = random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> "LocalGPs":
        """Train on rows X (n, d), standardised by all of them, and targets y (n,)."""
        start = time.process_time()
        self._inputs = StandardScaler().fit(X)
        self._mean, self._scale = y.mean(), y.std()
        self._X, self._y = self._inputs.transform(X), (y - self._mean) / self._scale
        clusters = KMeans(self.n_experts, n_init=1, random_state=self.random_state).fit(self._X)
        self._centres = NearestNeighbors(n_neighbors=1).fit(clusters.cluster_centers_)
        self._rows = NearestNeighbors(n_neighbors=self.n_rows).fit(self._X)
        nearest = self._rows.kneighbors(clusters.cluster_centers_, return_distance=False)
        self._experts = [
            GaussianProcessRegressor(self._kernel(X.shape[1])).fit(self._X[rows], self._y[rows])
            for rows in nearest
        ]
        self.fit_seconds_ = time.process_time() - start
        return self

    def score(self, X: np.ndarray, y: np.ndarray) -> Scores:
        """RMSE and mean NLL in nats, y standardised."""
        rows = self._inputs.transform(X)
        expert = self._centres.kneighbors(rows, return_distance=False)[:, 0]
        mean, std = np.empty(len(X)), np.empty(len(X))
        for j in np.unique(expert):
            mine = np.flatnonzero(expert == j)
            predict = (
                self._from_neighbors if self.transductive else GaussianProcessRegressor.predict
            )
            mean[mine], std[mine] = predict(self._experts[j], rows[mine], return_std=True)
        return target_scores((y - self._mean) / self._scale, mean, std)

    def _from_neighbors(
        self, expert: GaussianProcessRegressor, X: np.ndarray, return_std: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each row from its own nearest training rows."""
        nearest = self._rows.kneighbors(X, return_distance=False)
        moments = []
        for row, rows in zip(X, nearest, strict=True):
            gp = GaussianProcessRegressor(expert.kernel_, optimizer=None)
            moments.append(gp.fit(self._X[rows], self._y[rows]).predict(row[None], return_std))
        mean, std = np.hstack(moments)
        return mean, std

    @staticmethod
    def _kernel(d: int) -> Any:
        shape = Matern(np.full(d, np.sqrt(d)), (1e-3, 1e4), nu=2.5)
        return ConstantKernel(1.0, (1e-4, 1e4)) * shape + WhiteKernel(0.1, (1e-6, 1e1))


def classifiers(random_state: int = 0) -> dict[str, Any]:
    """Classifiers of scikit-learn by name: of pixels, and of columns of any units (the last)."""
    pixels = FunctionTransformer(pixels_to_unit)
    network = MLPClassifier((256,), early_stopping=True, random_state=random_state)
    return {
        "SVC(RBF)": make_pipeline(pixels, SVC(C=10.0, cache_size=2000)),
        "MLPClassifier": make_pipeline(pixels, network),
        "HistGradientBoosting 1500": HistGradientBoostingClassifier(
            max_iter=1500, early_stopping=False, random_state=random_state
        ),
    }


def pixels_to_unit(X: np.ndarray) -> np.ndarray:
    """Grey values from 0 to 255 as numbers from 0 to 1."""
    return X / 255.0


def target_scores(z: np.ndarray, mean: np.ndarray, std: np.ndarray) -> Scores:
    """RMSE (``loss``) and mean NLL (``nll``, nats) of Gaussian predictions."""
    nll = np.mean(0.5 * np.log(2 * np.pi * std**2) + 0.5 * ((z - mean) / std) ** 2)
    return {"loss": float(np.sqrt(np.mean((z - mean) ** 2))), "nll": float(nll)}


def class_scores(y: np.ndarray, probability: np.ndarray) -> Scores:
    """Error rate (``loss``) and mean NLL (``nll``, nats); y 0 or 1 and the probability of 1."""
    right = np.where(y > 0, probability, 1 - probability)
    nll = -np.log(np.clip(right, _LEAST_PROBABILITY, None)).mean()
    return {"loss": float(np.mean((probability > 0.5) != (y > 0))), "nll": float(nll)}

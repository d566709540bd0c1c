r"""Hyper-parameters of a classifier's kernel, learned on some rows before any model is fitted.

The objective is the Laplace evidence (:mod:`skgp.learning.laplace_evidence`) of a dense GP on a
stratified random subset, its mean over one-vs-rest columns. Of some thousand rows it tells kernel
families, overall length scale and amplitude well apart, and overfits ARD length scales. Hence

1. every kernel is fitted on a small subset with its length scales *tied*: they move by a common
   factor, their ratios stay; the best goes on;
2. it is fitted on the whole subset, tied, and then *relaxed*: every length scale on its own, drawn
   towards the tied ones by a normal prior on the logarithms of their ratios;
3. where there are many more rows, ratios also come from the nearest-neighbour leave-one-out
   likelihood of a regression on the labels (:func:`skgp.learning.search.fit_leave_one_out`),
   for which every row counts; amplitude and common factor are then refitted by the evidence.

Whichever has the best score is kept: log evidence per row of the subset plus mean log density of
held-out rows, in equal parts. On held-out parts of training sets that sum chose better than either
of its terms did: the second alone is noisy, the first alone prefers ARD. The density is that of
moderated probabilities (:mod:`skgp.learning.calibration`), as predictions are: at the latent mode a
large amplitude that is sure of a wrong label loses to a worse kernel.

A kernel vector of more than ``max_free`` length scales is only ever moved as a whole, at ratios
that numbers in place of the labels suggest (:func:`skgp.learning.label_scales.latent_structure`).

Of a kernel that an estimator chooses by itself (``rescales``) amplitude and common factor of the
length scales may move once more, to what predicts labels left out
(:mod:`skgp.learning.label_scales`).

Labels that are few, or few of one class, say little of any of it: the likeliest f is then none at
all, or one that follows each rare label. ``scale_std`` is for kernels that an estimator chooses by
itself, whose start is a typical one: amplitude and common factor are drawn towards it.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.linalg import block_diag
from torch import Tensor

from skgp.data import Data, replicates
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.kernels.gram import gram_diag
from skgp.kernels.hyperparameters import bounds_of, n_dims_of, sizes_of, theta_of, with_theta
from skgp.learning.calibration import choose_moderation
from skgp.learning.defaults import LABEL_NOISE, LABEL_NOISE_BOUNDS
from skgp.learning.label_scales import capped, latent_start, latent_structure, rescale_few
from skgp.learning.laplace_evidence import LaplaceEvidence, check_no_noise, laplace_predict
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_leave_one_out
from skgp.learning.selection import class_codes
from skgp.linalg.runtime import Callback, standard_normal
from skgp.optim.bfgs import minimize_within
from skgp.optim.stopping import LossRecorder, StopRecorder

_NOTHING = np.zeros((0, 0))  # mathematical: keeps block_diag right where a kernel has nothing free


@dataclass(frozen=True)
class ClassificationSettings:
    """How long and on how many rows to search; defaults chosen on held-out parts of training sets.

    A subset of more than two columns is smaller (:func:`subset_rows`).
    """

    subset_size: int = 1000  # rows of the dense GP
    screen_size: int = 500  # rows on which kernels are compared first
    n_score_rows: int = 1000  # held-out rows
    few_rows: int = 200  # up to which none is held out: the evidence alone decides
    max_iter: int = 30  # of L-BFGS-B, each search
    max_free: int = 100  # longest vector of length scales that is fitted one by one
    ratio_std: float = 0.5  # of the log ratio of a length scale to the tied one, a priori
    scale_std: float = math.inf  # of logs of amplitudes and common factors, about their start
    rescales: bool = False  # whether labels left out have the last word on these
    neighbor_rows: int = 20_000  # of the leave-one-out search at most; 0 leaves it out
    neighbor_search: SearchSettings = SearchSettings(n_neighbors=32, batch_size=96, n_steps=100)


def fit_classification_hyperparameters(
    kernels: list,  # without WhiteKernel; theta is the start, bounds are respected
    data: Data,  # float64; y (n, c), labels -1 and +1, one column a one-vs-rest problem
    *,
    offset: Tensor,  # (c,), constants of the latent functions
    likelihood,  # a Bernoulli
    generator: torch.Generator,  # on the CPU
    settings: ClassificationSettings | None = None,
    callback: Callback | None = None,  # told "loss", in nats per row; True ends with the best
) -> HyperparameterFit:
    """Choose one of several kernels and learn its hyper-parameters.

    The ``score`` is as above, in nats; ``log_marginal_likelihood`` is the mean evidence of a column
    on the subset, in nats. The amplitude is that of the subset: more rows support a larger one.
    """
    settings = settings or ClassificationSettings()
    for kernel in kernels:
        check_no_noise(kernel)
    if not any(map(n_dims_of, kernels)):
        return HyperparameterFit(kernels[0])
    if data.weight is not None:
        data = capped(data.take((data.weight > 0).nonzero()[:, 0]))
    recorder = StopRecorder(callback)
    search = _Search(data, offset, likelihood, settings, generator, recorder)
    if len(kernels) == 1:
        other = latent_start(kernels[0], search.few, likelihood)
        kernels = kernels if other is None else [*kernels, other]
    fits = []
    for kernel in kernels:
        search.origin = theta_of(kernel)
        fits.append(search.tied(kernel, screen=True))
        if recorder.stopped:
            return max(fits, key=lambda fit: fit.score)
    best = max(range(len(fits)), key=lambda i: fits[i].score)
    search.origin = theta_of(kernels[best])
    chosen = search.tied(fits[best].kernel) if search.is_screened_on_few else fits[best]
    # One length scale for all columns may be ahead until those of the others move.
    ratios = [i for i, kernel in enumerate(kernels) if search.has_ratios(kernel)]
    other = max(ratios, key=lambda i: (i == best, fits[i].score), default=best)
    fits = [chosen]
    search.origin = theta_of(kernels[other])
    for refine, kernel in (
        (search.relaxed, chosen.kernel),
        (search.from_numbers, kernels[other]),
        (search.from_neighbors, chosen.kernel),
    ):
        if search.has_ratios(kernel) and not recorder.stopped:
            fits += refine(kernel)
    found = max(fits, key=lambda fit: fit.score)
    return found if recorder.stopped or not settings.rescales else search.rescaled(found)


def stratified_order(data: Data, generator: torch.Generator) -> Tensor:
    """A random order (n,) whose every beginning has the classes in their proportions.

    The first row of each class comes before the second of any, but for rows of equal input, which
    follow each other: a label held out is not predicted from its own input. Of labels (n, c),
    c > 1, the first column that is +1 names the class.
    """
    Y = data.y
    label = class_codes((Y > 0).to(torch.int8))
    shuffled = torch.randperm(len(label), generator=generator, device=generator.device).to(Y.device)
    place = torch.empty(len(label), dtype=torch.float64, device=Y.device)
    for value in label.unique():
        members = shuffled[label[shuffled] == value]
        place[members] = (torch.arange(len(members), device=Y.device) + 0.5).double() / len(members)
        place[members[0]] = -1.0
    order = shuffled[place[shuffled].argsort(stable=True)]
    unit = torch.from_numpy(replicates(data.X[order].cpu().numpy())).to(order.device)
    return order[unit.argsort(stable=True)]


def rare_total(Y: Tensor) -> int:
    """How many of the labels Y (n, c) are not of the most frequent class."""
    positive = (Y > 0).sum(0)
    counts = torch.cat([positive, len(Y) - positive]) if Y.shape[1] == 1 else positive
    return len(Y) - int(counts.max())


def subset_rows(n: int, c: int, settings: ClassificationSettings) -> tuple[int, int]:
    """Sizes of the subset and of the held-out rows, of n rows with c columns.

    A subset of ``subset_size (2 / c)^(1/3)`` rows makes c > 2 columns cost twice as much as one. At
    least a third of more than ``few_rows`` rows are held out.
    """
    if n <= settings.few_rows:
        return n, 0
    size = min(rows_of(settings.subset_size, c), 2 * n // 3)
    return size, min(n - size, settings.n_score_rows)


def rows_of(size: int, c: int) -> int:
    """That many of one or two columns, fewer of c, which then cost no more than two."""
    return round(size * min(1.0, (2 / c) ** (1 / 3)))


class _Search:
    """Searches over theta on one draw of rows, all scored on the same held-out rows.

    ``origin`` is the theta that the prior is about.
    """

    origin: np.ndarray

    def __init__(self, data, offset, likelihood, settings, generator, callback) -> None:
        self.data, self.offset, self.likelihood = data, offset, likelihood
        self.settings, self.generator, self.callback = settings, generator, callback
        n, c = data.y.shape
        size, n_held_out = subset_rows(n, c, settings)
        order = stratified_order(data, generator)
        self.subset = data.take(order[:size])
        self.held_out = data.take(order[size : size + n_held_out])
        self.judged = data.take(order[: rows_of(settings.subset_size, c)])
        self.few = self.subset.take(slice(0, settings.screen_size))
        self.is_screened_on_few = len(self.few) < len(self.subset)

    def tied(self, kernel, *, screen: bool = False) -> HyperparameterFit:
        """Amplitudes and common factors of the length scales."""
        rows = self.few if screen else self.subset
        return self._maximise(kernel, directions(kernel, max_free=1), rows)

    def relaxed(self, kernel) -> list[HyperparameterFit]:
        """Every length scale on its own, near the ratios of the kernel given; none if too many."""
        moves = directions(kernel, self.settings.max_free)
        if moves.shape[1] == directions(kernel, max_free=1).shape[1]:
            return []
        return [self._maximise(kernel, moves, self.subset)]

    def from_numbers(self, kernel) -> list[HyperparameterFit]:
        """Ratios of length scales from a regression on the labels of few rows, and near those."""
        options: dict = {"generator": self.generator, "callback": self.callback}
        found = latent_structure(kernel, self.data, self.likelihood, **options)
        if found is None or self.callback.stopped:
            return []
        start, penalty = found
        fit = self.tied(start)
        fits = [fit, *self.relaxed(fit.kernel)]
        penalty *= self._share_of_evidence / self.subset.total
        return [replace(fit, score=fit.score - penalty) for fit in fits]

    def from_neighbors(self, kernel) -> list[HyperparameterFit]:
        """Ratios of length scales from a regression on the labels of many rows."""
        used = len(self.subset) + len(self.held_out)
        n = min(len(self.data), self.settings.neighbor_rows)
        all_free = directions(kernel, self.settings.max_free).shape[1] == kernel.n_dims
        if n <= used or not all_free:
            return []
        random = self.generator
        rows = torch.randperm(len(self.data), generator=random, device=random.device)[:n]
        data = self.data.take(rows.to(self.data.X.device))
        found = self._leave_one_out(kernel, data)
        fit = self.tied(found)
        return [replace(fit, method="leave-one-out")]

    def rescaled(self, fit: HyperparameterFit) -> HyperparameterFit:
        """With the amplitude and the common factor of length scales that labels left out prefer."""
        few = self.few.take(slice(0, rows_of(self.settings.screen_size, self.data.y.shape[1])))
        model = self.likelihood, self.offset
        found = rescale_few(fit.kernel, few, self.judged, *model, callback=self.callback)
        if found is None:
            return fit
        evidence = self._evidence(found, self.subset)
        return replace(
            self._scored(found, self.subset, evidence, theta_of(found)), history=fit.history
        )

    @property
    def _share_of_evidence(self) -> float:
        """Of the score; the rest is that of the observations held out."""
        return 0.5 if len(self.held_out) else 1.0

    def has_ratios(self, kernel) -> bool:
        """Whether any length scales may differ."""
        return max(sizes_of(kernel), default=0) > 1

    def _leave_one_out(self, kernel, data: Data):
        """The kernel, its theta from regression on labels scaled to the kernel's own variance."""
        variance = float(gram_diag(kernel, data.X).mean())
        direction = standard_normal((data.y.shape[1],), self.generator)
        target = data.y.double() @ direction.to(data.y.device)
        target = (target - target.mean()) / target.std().clamp(min=1e-12) * math.sqrt(variance)
        low, high = LABEL_NOISE_BOUNDS
        noise = WhiteKernel(LABEL_NOISE * variance, (low * variance, high * variance))
        fit = fit_leave_one_out(
            kernel + noise,
            replace(data, y=target).merged(),
            generator=self.generator,
            settings=self.settings.neighbor_search,
            callback=self.callback,
        )
        return split_noise(fit.kernel)[0]

    def _evidence(self, kernel, rows: Data) -> LaplaceEvidence:
        return LaplaceEvidence.of(kernel, rows, self.likelihood, self.offset)

    def _maximise(self, kernel, moves: np.ndarray, rows: Data) -> HyperparameterFit:
        """L-BFGS-B over z, ``theta = start + moves z``; the best theta seen, scored."""
        objective, recorder = _Objective(self, kernel, moves, rows), LossRecorder(self.callback)
        theta = objective.start
        if moves.shape[1]:
            options = {"max_iter": self.settings.max_iter, "tol": 1e-5, "refuse_far": False}
            place = np.zeros(moves.shape[1]), objective.bounds()
            z, _ = minimize_within(objective, *place, **options, tell=recorder.tell)
            theta = theta + moves @ z
        found = self._scored(with_theta(kernel, theta), rows, objective.evidence, theta)
        return replace(found, history=recorder.history)

    def _scored(
        self, kernel, rows: Data, of: LaplaceEvidence, theta: np.ndarray
    ) -> HyperparameterFit:
        """The fit with its evidence on `rows` and its score."""
        with torch.no_grad():
            fit = of.fit(theta)
            evidence = float(fit.log_evidence.mean())
            score, new = evidence / rows.total, self.held_out
            if len(new):
                moments = laplace_predict(fit, kernel, rows.X, new.X)
                moderation, losses = choose_moderation(
                    self.likelihood, new.y, *moments, new.weight, separately=True
                )
                share, loss = self._share_of_evidence, float(new.weighted_mean(losses[moderation]))
                score = share * score - (1 - share) * loss
        how = "Laplace evidence"
        return HyperparameterFit(kernel, score, how, log_marginal_likelihood=evidence)


class _Objective:
    """Minus the penalised mean evidence per row and its gradient, as functions of z.

    `averaging` (n_vectors, n_dims) takes theta to the mean of each vector, `centring`
    (n_dims, n_dims) to the deviations from it.
    """

    def __init__(self, search: _Search, kernel, moves: np.ndarray, rows: Data) -> None:
        self.search, self.kernel, self.moves, self.rows = search, kernel, moves, rows
        self.limits = bounds_of(kernel).T
        self.start = np.clip(theta_of(kernel), *self.limits)
        sizes = sizes_of(kernel)
        self.averaging = block_diag(_NOTHING, *(np.full((1, size), 1 / size) for size in sizes))
        self.centring = np.eye(len(self.start)) - (self.averaging > 0).T @ self.averaging
        self.evidence = search._evidence(kernel, rows)

    def bounds(self) -> np.ndarray:
        """Bounds of z (n_moves, 2) within which every element of theta keeps its own."""
        return np.array(bounds_along(self.moves, *(self.limits - self.start)))

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        theta, total = self.start + self.moves @ z, self.rows.total
        values, gradient = self.evidence(theta)
        penalty, slope = self._penalty(theta)
        loss = (penalty - float(values.mean())) / total
        return loss, self.moves.T @ ((slope - gradient / len(values)) / total)

    def _penalty(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """Minus the log prior of theta, and its gradient."""
        search = self.search
        ratios = self.centring @ (theta - self.start) / search.settings.ratio_std
        scales = self.averaging @ (theta - search.origin) / search.settings.scale_std
        slope = self.centring @ ratios / search.settings.ratio_std
        slope = slope + self.averaging.T @ scales / search.settings.scale_std
        return 0.5 * float(ratios @ ratios + scales @ scales), slope


def bounds_along(moves: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[tuple[float, float]]:
    """Bounds of z (n_moves,) within which the changes ``moves z`` are between low and high (p,)."""
    return [(low[move > 0].max(), high[move > 0].min()) for move in moves.T]


def directions(kernel, max_free: int) -> np.ndarray:
    """Moves of theta, of zeros and ones, shape (kernel.n_dims, n_moves), one a column.

    Vectors of more than `max_free` elements move as a whole.
    """
    sizes = sizes_of(kernel)
    blocks = [np.eye(size) if size <= max_free else np.ones((size, 1)) for size in sizes]
    return block_diag(_NOTHING, *blocks)

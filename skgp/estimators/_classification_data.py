"""Observations of classifiers: labels, their codes, and weights of classes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logit, ndtri
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from skgp.blocks import Blocks, MappedBlocks
from skgp.data import Data
from skgp.estimators._base import Backend, BaseGP, arrays, keep_weighted_rows, to_tensor
from skgp.estimators._blocks import checked_moments, class_blocks, class_masses, some_of
from skgp.estimators._parameters import StrOptions
from skgp.estimators._validation import (
    distinct_labels,
    listing,
    natural_dtype,
    validate_training_data,
)
from skgp.estimators.defaults import LEAST_BASE_RATE
from skgp.kernels.scales import capped_weights
from skgp.learning.selection import class_codes
from skgp.likelihoods import Bernoulli


class ClassificationData(BaseGP):
    """Validation of labels, which become indices into ``classes_``, and of weights.

    Parameters
    ----------
    class_weight : dict, "balanced" or None, default=None
        Weights of classes, which multiply those of observations.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The labels, in order.
    """

    _parameter_constraints = {"class_weight": [dict, StrOptions({"balanced"}), None]}

    class_weight: dict | str | None
    likelihood: str
    classes_: np.ndarray
    offset_: np.ndarray
    _likelihood: Bernoulli
    #: Weights of all rows of each class, where these are read in blocks.
    _mass: np.ndarray | None

    def _validate_training(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> Data:
        """Set ``classes_`` and return the observations, y (n,) being indices into it.

        ValueError where scikit-learn raises it, and unless there are labels of two classes or more
        (in rows of positive weight), not of one row each.
        """
        X, labels, weight = self._validate_rows(X, y, sample_weight, reset=True)
        classes = distinct_labels(labels, "y")
        check_classes(classes, len(labels), sample_weight is not None)
        data = self._coded(X, labels, classes, weight)
        self._begin_fit()
        self._learn_warp(X, self._one_vs_rest(data), chooses=True)
        return replace(data, X=to_tensor(self._warped(X)))

    def _labelled(self, blocks: Blocks, backend: Backend) -> MappedBlocks:
        """Set ``classes_``; the observations as `_validate_training` has them."""
        classes, blocks = class_blocks(blocks)
        moments = checked_moments(blocks, self.dtype)
        weighted = moments.weight != moments.n_rows
        check_classes(classes, moments.n_rows, weighted)
        mass = blocks.sum(partial(class_masses, n_classes=len(classes)))
        factor = np.ones(len(classes))
        if self.class_weight is not None:
            codes = np.arange(len(classes))
            factor = class_weights(self.class_weight, classes, codes, mass)
        self.classes_, self._mass = classes, factor * mass
        self._begin_fit()
        seen = partial(_class_weighted, factor=None if self.class_weight is None else factor)
        return MappedBlocks(blocks, seen, float(self._mass.sum()), seen(some_of(blocks, backend)))

    def _set_link(self, data: Data, *, cautious: bool = False) -> None:
        """Set the likelihood and ``offset_``, by the base rates; of blocks those of all rows."""
        Y, weight = self._one_vs_rest(data), arrays(data)[1]
        if self._mass is not None:
            n_classes = len(self.classes_)
            Y, weight = one_vs_rest(np.arange(n_classes), n_classes), self._mass
        self.offset_ = base_rate_offset(Y, weight, link=self.likelihood, cautious=cautious)
        self._likelihood = Bernoulli(self.likelihood)

    def _validate_rows(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, *, reset: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Check rows, labels as such, and weights; drop the rows of weight 0."""
        X, given = validate_training_data(self, X, y, reset=reset)
        labels = natural_dtype(given)
        distinct_labels(labels, "y")  # says what is wrong with a mixture; the next line does not
        check_classification_targets(labels)
        return keep_weighted_rows(X, labels, sample_weight)

    def _coded(
        self, X: np.ndarray, y: np.ndarray, classes: np.ndarray, weight: np.ndarray | None
    ) -> Data:
        """Set ``classes_``; observations with the weight of each times that of its class."""
        codes = encode(y, classes)
        if self.class_weight is not None:
            factor = class_weights(self.class_weight, classes, codes, weight)[codes]
            weight = factor if weight is None else factor * weight
        self.classes_, self._mass = classes, None
        numbers = to_tensor(codes.astype(np.float64))
        return Data(to_tensor(X), numbers, None if weight is None else to_tensor(weight))

    def _one_vs_rest(self, data: Data) -> np.ndarray:
        """The coding Y (n, c) in {-1., +1.} of the indices y: see `one_vs_rest`."""
        return one_vs_rest(data.y.cpu().numpy().astype(np.int64), len(self.classes_))

    def _validate_batch(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        classes: ArrayLike | None = None,
        first: bool,
    ) -> Data:
        """As `_validate_training`, for one call of ``partial_fit``.

        The `first` sets ``classes_``, those of y where `classes` is None, and the columns of X.
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} needs all rows at once and cannot be had from "
                "partial_fit; give a dictionary, or use fit."
            )
        X, labels, weight = self._validate_rows(X, y, sample_weight, reset=first)
        asked = None if classes is None else distinct_labels(classes, "classes")
        if first:
            known = distinct_labels(labels, "y") if asked is None else asked
            if len(known) < 2:
                raise ValueError(
                    f"partial_fit knows of one class, {known.tolist()[0]!r}; a classifier needs "
                    "two classes or more. Name all of them by classes= in the first call."
                )
        else:
            known = self.classes_
            if asked is not None and not np.array_equal(asked, known):
                raise ValueError(
                    f"classes={asked.tolist()} differs from that of the first call of "
                    f"partial_fit, {known.tolist()}. Leave it out, or call fit to begin anew."
                )
        data = self._coded(X, labels, known, weight)
        if first:
            self._begin_fit(informed=len(data.y.unique()) > 1)
            self._learn_warp(X, self._one_vs_rest(data), chooses=False)
        return replace(data, X=to_tensor(self._warped(X)))


def check_classes(classes: np.ndarray, n_rows: int, weighted: bool) -> None:
    """Refuse labels of one class, or of a class each."""
    if len(classes) < 2:
        rows = ", in the rows of positive sample_weight" if weighted else ""
        raise ValueError(
            f"y holds one class, {classes.tolist()[0]!r}{rows}; a classifier needs two classes "
            "or more. Give rows of another class."
        )
    if len(classes) == n_rows > 2:
        raise ValueError(
            f"y holds {len(classes)} classes in {n_rows} rows: each row is a class of its "
            "own. Merge classes, or use a regressor if y is a quantity."
        )


def coded_columns(data: Data, *, n_classes: int) -> Data:
    """Observations with y (n, c) coded as `one_vs_rest` does."""
    codes = data.y.numpy().astype(np.int64)
    return replace(data, y=to_tensor(one_vs_rest(codes, n_classes)))


def _class_weighted(data: Data, *, factor: np.ndarray | None) -> Data:
    """Observations, weighted by the factors (n_classes,) of their classes, too."""
    if factor is None:
        return data
    weight = to_tensor(factor)[data.y.long()]
    return replace(data, weight=weight if data.weight is None else weight * data.weight)


def encode(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the index into ``classes`` of each label, shape (n,).

    ValueError names labels that are not among ``classes``.
    """
    index = {label: code for code, label in enumerate(classes.tolist())}
    labels = distinct_labels(y, "y")
    unseen = [label for label in labels.tolist() if label not in index]
    if unseen:
        raise ValueError(
            f"y holds labels that are not among the classes: {listing(unseen)}. The classes are "
            f"{listing(list(index))}. Leave such rows out, or fit with rows of every class "
            "(partial_fit: name all of them by classes= in the first call)."
        )
    codes = np.array([index[label] for label in labels.tolist()])
    return codes[np.searchsorted(labels, y)]


def class_weights(
    class_weight: dict | str,
    classes: np.ndarray,
    codes: np.ndarray,
    sample_weight: np.ndarray | None,
) -> np.ndarray:
    """Return the weight of each class, shape (n_classes,).

    ``class_weight`` holds weights by label, 1 where it is silent; "balanced" is inversely
    proportional to the (weighted) number of rows of the class. A key that is no class is an error
    only if a class goes without a weight: else it may be a class that has no row in a fold of
    cross-validation. ``codes`` (n,) index ``classes``.
    """
    if isinstance(class_weight, str):
        return compute_class_weight(
            class_weight, classes=np.arange(len(classes)), y=codes, sample_weight=sample_weight
        )
    labels = classes.tolist()
    unknown = [key for key in class_weight if key not in labels]
    silent = [label for label in labels if label not in class_weight]
    if unknown and silent:
        raise ValueError(
            f"class_weight has keys that are no classes, {listing(unknown)}, and no weight for "
            f"{listing(silent)}. The classes are {listing(labels)}."
        )
    weights = np.array([class_weight.get(label, 1.0) for label in labels], dtype=np.float64)
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise ValueError(
            f"class_weight must be positive and finite; got {class_weight}. To leave a class out, "
            "leave out its rows or give them sample_weight 0."
        )
    return weights


def one_vs_rest(codes: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the coding Y (n, c) in {-1., +1.}: c = 1 for two classes, else one column a class.

    ``codes`` (n,) run from 0; of two classes the column is +1 for code 1.
    """
    positive = np.array([1]) if n_classes == 2 else np.arange(n_classes)
    return np.where(codes[:, None] == positive, 1.0, -1.0)


def base_rate_offset(
    Y: np.ndarray,
    sample_weight: np.ndarray | None = None,
    *,
    link: str = "logit",
    cautious: bool = False,
) -> np.ndarray:
    r"""Return the constant latent function that predicts the base rates, shape (c,).

    .. math:: g^{-1}\Big(\sum_i w_i [Y_{ik} = 1] \Big/ \sum_i w_i\Big)

    with shares kept 1e-6 away from 0 and 1, where it is infinite, and weights capped: one row that
    outweighs all others by far is no base rate.

    ``Y`` (n, c) is in {-1., +1.}; g is the sigmoid of ``link``. ``cautious`` counts a row of each
    kind more: rows of a class may come later.
    """
    if cautious:
        Y = np.vstack([Y, np.ones_like(Y[:1]), -np.ones_like(Y[:1])])
        if sample_weight is not None:
            sample_weight = np.append(sample_weight, [sample_weight.mean()] * 2)
    share = np.average(Y > 0, axis=0, weights=capped_weights(sample_weight, class_codes(Y)))
    share = np.clip(share, LEAST_BASE_RATE, 1 - LEAST_BASE_RATE)
    return {"logit": logit, "probit": ndtri}[link](share)

"""What every classifier obeys. A test module inherits it::

class TestMyClassifier(ClassifierContract):
    def make(self, **params):
        return MyClassifier(**{"max_iter": 5, "random_state": 0, **params})

test_sklearn = sklearn_checks(MyClassifier(max_iter=5, random_state=0))
"""

from copy import copy

import numpy as np
import pytest
from scipy.special import logit
from sklearn.base import clone, is_classifier
from sklearn.datasets import make_moons
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.metrics import accuracy_score, log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skgp.estimators import log_predictive_density_scorer
from tests.contracts.common import EstimatorPredictions, InputContract, Recorder, sklearn_checks
from tests.same import assert_same

__all__ = ["ClassifierContract", "ClassifierPredictions", "Recorder", "sklearn_checks"]

#: Two labels of each kind, in order.
LABELS = {
    "string": np.array(["no", "yes"]),
    "object": np.array(["no", "yes"], dtype=object),
    "bool": np.array([False, True]),
    "boxed int": np.array([3, 10**12], dtype=object),
    "sign": np.array([-1, 1]),
    "unsigned": np.array([1, 2], dtype=np.uint8),
    "float": np.array([1.0, 2.0]),
}


class ClassifierPredictions(EstimatorPredictions):
    """What a classifier predicts; a subclass gives `make` and may loosen a threshold."""

    #: Least accuracy of the defaults on 200 rows of easy data, inputs of any scale.
    easy_accuracy = 0.9
    #: Relative tolerance between what weights say and what rows say.
    weight_rtol = 1e-7
    #: Absolute tolerances of probabilities, between a row of weight 2 and the row twice ...
    doubling_atol = 1e-6
    #: ... and between orders of the names of the classes.
    permutation_atol = 1e-6

    scoring = "accuracy"
    least_score = 0.8
    scalar_kernel = 4.0 * RBF(1.0)
    length_scale = "kernel__k2__length_scale"

    def make_streaming(self, **params):
        """Return an estimator that offers ``partial_fit``, if there is one."""
        return self.make(**params)

    def kernel(self, n_columns=2):
        return ConstantKernel(4.0) * RBF([1.5] * n_columns)

    def outputs(self, estimator, X):
        return estimator.predict_proba(X)

    def methods(self, X, y):
        return {
            "predict": (X,),
            "predict_proba": (X,),
            "predict_log_proba": (X,),
            "decision_function": (X,),
            "latent_mean_and_variance": (X,),
            "log_predictive_density": (X, y),
            "score": (X, y),
        }

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls):
        rng = np.random.default_rng(0)
        X = rng.uniform(-2, 2, (40, 2))
        return X, LABELS["string"][(two_class_signal(X, rng) > 0).astype(int)]

    @pytest.fixture(scope="class")
    @classmethod
    def three(cls):
        rng = np.random.default_rng(3)
        X = rng.uniform(-2, 2, (48, 2))
        codes = np.digitize(two_class_signal(X, rng), [-0.5, 0.5])
        return X, np.array(["blue", "green", "red"])[codes]

    @pytest.fixture(scope="class", params=["two", "three"])
    @classmethod
    def problem(cls, request, data, three):
        """Rows and labels of two classes, then of three."""
        return data if request.param == "two" else three

    @pytest.fixture(scope="class")
    @classmethod
    def learned(cls, problem):
        """What the defaults learn of `problem`; not to be changed."""
        return cls().make().fit(*problem)

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, problem, X_new):
        """Probabilities at X_new of a fit to `problem` with a kernel that is kept."""
        return cls().proba(*problem, X_new)

    def proba(self, X, y, X_new, *, sample_weight=None, **params):
        """Probabilities at X_new of a fit with a kernel that is kept."""
        estimator = self.make(**{"kernel": self.kernel(), "optimizer": None, **params})
        return estimator.fit(X, y, sample_weight=sample_weight).predict_proba(X_new)

    # ---- the predictive interface ----------------------------------------------------------

    def test_shapes(self, learned, problem, X_new):
        assert list(learned.classes_) == sorted(set(problem[1]))
        n_classes = len(learned.classes_)
        proba, log_proba = learned.predict_proba(X_new), learned.predict_log_proba(X_new)
        assert proba.shape == log_proba.shape == (7, n_classes)
        mean, var = learned.latent_mean_and_variance(X_new)
        shape = (7,) if n_classes == 2 else (7, 3)
        assert mean.shape == var.shape == learned.decision_function(X_new).shape == shape

    def test_everything_is_float64_even_of_a_fit_in_float32(self, problem, X_new):
        estimator = self.make(dtype="float32", kernel=self.kernel(), optimizer=None).fit(*problem)
        arrays = [
            estimator.predict_proba(X_new),
            estimator.predict_log_proba(X_new),
            estimator.decision_function(X_new),
            estimator.log_predictive_density(*problem),
            *estimator.latent_mean_and_variance(X_new),
        ]
        assert all(array.dtype == np.float64 for array in arrays)

    def test_decision_function_is_the_logit_of_the_probability(self, learned, X_new):
        proba = learned.predict_proba(X_new)
        proba = proba[:, 1] if proba.shape[1] == 2 else proba
        np.testing.assert_allclose(
            learned.decision_function(X_new), logit(proba), rtol=1e-7, atol=1e-10
        )

    def test_moderation_says_how_much_of_the_variance_counts(self, learned, X_new):
        estimator = copy(learned)
        assert 0 <= estimator.moderation_ <= 1
        estimator.moderation_ = 1.0
        averaged = estimator.predict_proba(X_new).max(1)
        estimator.moderation_ = 0.0
        # The fast path: no variance is asked for.
        estimator._moments = None
        plain = estimator.predict_proba(X_new).max(1)
        if len(estimator.classes_) == 2:
            assert (averaged < plain).all()  # nearer to 1/2

    def test_latent_mean_favours_the_likeliest_class(self, learned, X_new):
        if learned.moderation_ and len(learned.classes_) > 2:
            pytest.skip("columns of unlike variance need not be ordered as their means")
        mean, var = learned.latent_mean_and_variance(X_new)
        best = mean.argmax(1) if mean.ndim == 2 else (mean > 0).astype(int)
        np.testing.assert_array_equal(learned.classes_[best], learned.predict(X_new))
        assert np.isfinite(mean).all() and (var >= 0).all()

    def test_log_predictive_density_is_that_of_the_labels(self, learned, problem):
        X, y = problem
        weights = np.arange(len(y), dtype=float)
        expected = [
            -log_loss(y, learned.predict_proba(X), sample_weight=w) for w in (None, weights)
        ]
        density = learned.log_predictive_density(X, y)
        assert density.shape == y.shape
        assert density.mean() == pytest.approx(expected[0])
        assert log_predictive_density_scorer(learned, X, y) == pytest.approx(expected[0])
        weighted = log_predictive_density_scorer(learned, X, y, sample_weight=weights)
        assert weighted == pytest.approx(expected[1])

    # ---- labels ----------------------------------------------------------------------------

    def test_names_of_the_classes_do_not_matter(self, problem, plain, X_new):
        X, y = problem
        classes = np.unique(y)
        other = {name: f"{rank}{name}" for rank, name in enumerate(classes[::-1])}
        renamed = self.proba(X, np.array([other[label] for label in y]), X_new)
        np.testing.assert_allclose(renamed[:, ::-1], plain, atol=self.permutation_atol)

    # ---- weights ---------------------------------------------------------------------------

    def test_weight_zero_is_absence(self, data, X_new):
        X, y = data
        weights = (np.arange(40) % 3 > 0).astype(float)
        weighted = self.make().fit(X, y, sample_weight=weights)
        without = self.make().fit(X[weights > 0], y[weights > 0])
        np.testing.assert_allclose(
            self.outputs(weighted, X_new), self.outputs(without, X_new), rtol=self.weight_rtol
        )

    def test_weight_two_is_the_row_twice(self, problem, X_new):
        X, y = problem
        weights = 1 + np.arange(len(y)) % 2
        np.testing.assert_allclose(
            self.proba(X, y, X_new, sample_weight=weights.astype(float)),
            self.proba(X.repeat(weights, 0), y.repeat(weights), X_new),
            atol=self.doubling_atol,
        )

    def test_class_without_positive_weight_is_absent(self, three, X_new):
        X, y = three
        kept = y != "green"
        params = {"kernel": self.kernel(), "optimizer": None}
        estimator = self.make(**params).fit(X, y, sample_weight=kept.astype(float))
        assert list(estimator.classes_) == ["blue", "red"]
        np.testing.assert_allclose(
            estimator.predict_proba(X_new),
            self.proba(X[kept], y[kept], X_new),
            rtol=self.weight_rtol,
        )

    # ---- units and awkward data ------------------------------------------------------------

    def test_defaults_are_accurate_at_any_scale_and_offset(self):
        X, codes = make_moons(390, noise=0.15, random_state=0)
        X = X * [1e-3, 1e6] + [1e-2, 1e8]
        labels = np.array(["down", "up"])[codes]
        estimator = self.make().fit(X[:90], labels[:90])
        assert estimator.score(X[90:], labels[90:]) >= self.easy_accuracy

    def test_defaults_are_accurate(self, problem, learned):
        assert learned.score(*problem) >= self.least_score

    def test_two_rows_are_accepted(self, X_new):
        estimator = self.make().fit([[1.0, 2.0], [2.0, 1.0]], ["a", "b"])
        assert np.isfinite(estimator.predict_proba(X_new)).all()
        assert list(estimator.predict([[1.0, 2.0], [2.0, 1.0]])) == ["a", "b"]

    def test_same_rows_of_unlike_labels_share_the_probability(self):
        X = np.zeros((20, 2))
        y = np.array([0] * 15 + [1] * 5)
        proba = self.make().fit(X, y).predict_proba(X[:1])[0]
        assert 0.5 < proba[0] < 0.9

    def test_rare_class_keeps_a_probability(self):
        rng = np.random.default_rng(0)
        X = rng.standard_normal((120, 2))
        y = np.zeros(120, dtype=int)
        y[:2] = 1
        estimator = self.make().fit(X, y)
        proba = estimator.predict_proba(X)[:, 1]
        assert np.isfinite(estimator.decision_function(X)).all()
        assert 0.001 < proba.mean() < 0.1

    # ---- streams ---------------------------------------------------------------------------

    @pytest.fixture
    def streaming(self):
        estimator = self.make_streaming(kernel=self.kernel(), optimizer=None)
        if not hasattr(estimator, "partial_fit"):
            pytest.skip("there is no partial_fit")
        return estimator

    def test_stream_learns_classes_that_come_late(self, streaming, three):
        X, y = three
        order = np.argsort(y, kind="stable")
        classes = ["red", "green", "blue"]
        streaming.partial_fit(X[order[:10]], y[order[:10]], classes=classes)
        assert list(streaming.classes_) == sorted(classes)
        assert np.isfinite(streaming.predict_proba(X)).all()
        for rows in (order[10:30], order[30:]):
            streaming.partial_fit(X[rows], y[rows])
        assert streaming.score(X, y) >= self.least_score


class ClassifierContract(InputContract, ClassifierPredictions):
    """The whole contract of a classifier."""

    def test_is_a_classifier(self):
        assert is_classifier(self.make())

    def test_log_predictive_density_takes_rows_of_one_class(self, fitted, data):
        X, y = data
        rows = y == "yes"
        np.testing.assert_allclose(
            fitted.log_predictive_density(X[rows], y[rows]),
            fitted.log_predictive_density(X, y)[rows],
            rtol=1e-7,
        )

    def test_log_predictive_density_names_unseen_labels(self, fitted, X_new):
        labels = ["no"] * 6 + ["yessir"]
        with pytest.raises(ValueError, match="not among the classes: 'yessir'. .*'no', 'yes'"):
            fitted.log_predictive_density(X_new, labels)

    def test_score_is_weighted_accuracy(self, fitted, data):
        X, y = data
        weights = np.arange(len(y), dtype=float)
        expected = accuracy_score(y, fitted.predict(X), sample_weight=weights)
        assert fitted.score(X, y, sample_weight=weights) == pytest.approx(expected)
        assert fitted.score(X, y) >= self.least_score

    @pytest.mark.parametrize("kind", LABELS)
    def test_labels_of_any_kind_give_the_same_fit(self, fitted, data, X_new, kind):
        X, y = data
        labels = LABELS[kind]
        codes = (y == "yes").astype(int)
        estimator = self.make(kernel=self.kernel(), optimizer=None).fit(X, labels[codes])
        assert estimator.classes_.tolist() == labels.tolist()
        assert_same(estimator.predict_proba(X_new), fitted.predict_proba(X_new))
        # scikit-learn's metrics do not read boxed numbers: no call of score.
        assert (estimator.predict(X) == labels[codes]).mean() >= self.least_score
        assert np.isfinite(estimator.log_predictive_density(X, labels[codes])).all()

    @pytest.mark.parametrize("dtype", ["category", "string"])
    def test_labels_of_pandas(self, fitted, data, X_new, dtype):
        pandas = pytest.importorskip("pandas")
        X, y = data
        estimator = self.make(kernel=self.kernel(), optimizer=None)
        estimator.fit(X, pandas.Series(y, dtype=dtype))
        assert_same(estimator.predict_proba(X_new), fitted.predict_proba(X_new))

    def test_class_weight_multiplies_sample_weight(self, problem, X_new):
        X, y = problem
        classes, codes = np.unique(y, return_inverse=True)
        class_weight = dict(zip(classes.tolist(), [2.0, 0.5, 1.0], strict=False))
        by_row = np.array([2.0, 0.5, 1.0])[codes]
        weights = None if len(classes) == 2 else np.linspace(0.5, 2, len(y))
        given = np.ones(len(y)) if weights is None else weights
        counts = np.bincount(codes, weights=given)
        balanced = (counts.sum() / (len(classes) * counts))[codes]
        for asked, factors in ((class_weight, by_row), ("balanced", balanced)):
            found = self.proba(X, y, X_new, sample_weight=weights, class_weight=asked)
            expected = self.proba(X, y, X_new, sample_weight=given * factors)
            np.testing.assert_allclose(found, expected, rtol=self.weight_rtol)

    def test_class_weight_leaves_silent_classes_at_one(self, fitted, data, X_new):
        found = self.proba(*data, X_new, class_weight={"yes": 5.0})
        expected = self.proba(*data, X_new, class_weight={"yes": 5.0, "no": 1.0})
        assert_same(found, expected)
        assert found[:, 1].mean() > fitted.predict_proba(X_new)[:, 1].mean()

    def test_pipeline_passes_probabilities_through(self, data):
        X, y = data
        pipeline = make_pipeline(StandardScaler(), self.make()).fit(X, y)
        assert pipeline.predict_proba(X).shape == (40, 2)
        assert pipeline.score(X, y) >= self.least_score

    def test_fit_refuses_one_class(self, data):
        X, y = data
        with pytest.raises(ValueError, match="one class, 'no'; a classifier needs two classes"):
            self.make().fit(X, np.full(40, "no"))
        weights = (y == "no").astype(float)
        with pytest.raises(ValueError, match="one class, 'no', in the rows of positive sample_wei"):
            self.make().fit(X, y, sample_weight=weights)

    def test_fit_refuses_a_class_a_row(self, data):
        with pytest.raises(ValueError, match="19 classes in 19 rows.*use a regressor"):
            self.make().fit(data[0][:19], np.arange(19))

    def test_fit_refuses_continuous_targets(self, data):
        X, _ = data
        with pytest.raises(ValueError, match="Unknown label type: continuous"):
            self.make().fit(X, X[:, 0])

    @pytest.mark.parametrize(
        ("label", "dtype", "message"),
        [
            (np.inf, float, "contains infinity"),
            (3, object, "types .'int', 'str'.*Convert them"),
        ],
    )
    def test_fit_refuses_infinite_and_mixed_labels(self, data, label, dtype, message):
        X, y = data
        labels = y.astype(object) if dtype is object else (y == "yes").astype(float)
        labels[3] = label
        with pytest.raises(ValueError, match=message):
            self.make().fit(X, labels)

    @pytest.mark.parametrize(
        ("class_weight", "message"),
        [
            ("even", "'class_weight' parameter"),
            ({"maybe": 2.0}, "no classes, 'maybe', and no weight for 'no', 'yes'"),
            ({"no": 0.0}, "class_weight must be positive.* sample_weight 0"),
            ({"no": -1.0}, "class_weight must be positive"),
            ({"no": np.nan}, "class_weight must be positive and finite"),
        ],
    )
    def test_fit_refuses_bad_class_weights(self, data, class_weight, message):
        with pytest.raises(ValueError, match=message):
            self.make(class_weight=class_weight).fit(*data)

    def test_fit_refuses_gaussian_noise(self, data):
        with pytest.raises(ValueError, match="WhiteKernel, which is the noise of a Gaussian"):
            self.make(kernel=RBF() + WhiteKernel()).fit(*data)

    def test_stream_takes_the_classes_of_its_first_rows(self, streaming, data):
        X, y = data
        assert list(streaming.partial_fit(X, y).classes_) == ["no", "yes"]
        with pytest.raises(ValueError, match="'maybe'.*name all of them by classes="):
            streaming.partial_fit(X[:1], ["maybe"])

    def test_stream_refuses_other_classes(self, streaming, data):
        X, y = data
        with pytest.raises(ValueError, match="one class, 'no'.*classes= in the first call"):
            clone(streaming).partial_fit(X[y == "no"], y[y == "no"])
        with pytest.raises(ValueError, match="not among the classes: 'yes'"):
            clone(streaming).partial_fit(X, y, classes=["no", "maybe"])
        streaming.partial_fit(X, y, classes=["no", "yes"])
        streaming.partial_fit(X, y, classes=["yes", "no"])
        with pytest.raises(ValueError, match="classes=.*differs from that of the first call"):
            streaming.partial_fit(X, y, classes=["no", "yes", "maybe"])

    def test_stream_refuses_balanced_classes(self, streaming, data):
        with pytest.raises(ValueError, match="class_weight='balanced' needs all rows at once"):
            streaming.set_params(class_weight="balanced").partial_fit(*data)


def two_class_signal(X, rng):
    """Return a smooth function of two columns, with noise, that is about symmetric around 0."""
    return np.sin(1.5 * X[:, 0]) + 0.7 * X[:, 1] + 0.15 * rng.standard_normal(len(X))

"""Every class within the rest of scikit-learn: a table of what works.

``python -m tests.estimators.test_composition`` prints it: a line for each use, a column for each
class, the error where there is one.
"""

import io
import sys
import warnings

import joblib
import numpy as np
import pytest
import sklearn
from sklearn.base import clone, is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.ensemble import BaggingRegressor, StackingClassifier, StackingRegressor
from sklearn.feature_selection import SequentialFeatureSelector
from sklearn.gaussian_process.kernels import RBF
from sklearn.inspection import partial_dependence, permutation_importance
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    cross_val_predict,
    cross_val_score,
    learning_curve,
)
from sklearn.multioutput import MultiOutputClassifier, MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler

import skgp
from tests.contracts.catalogue import cheap

CLASSES = [getattr(skgp, name) for name in skgp.__all__]
FOLDS = KFold(2, shuffle=True, random_state=0)


def data(estimator, n=40):
    """X (n, 2) and y (n,), numbers or labels that both folds have."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 4, (n, 2))
    y = np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] + 0.1 * rng.standard_normal(n)
    return X, np.where(y > np.median(y), "a", "b") if is_classifier(estimator) else y


def pandas_frames(estimator):
    pd = pytest.importorskip("pandas")
    X, y = data(estimator)
    frame = pd.DataFrame(X, columns=["time", "depth"], index=range(100, 140))
    model = clone(estimator).fit(frame, pd.Series(y, index=frame.index))
    assert list(model.feature_names_in_) == ["time", "depth"]
    np.testing.assert_array_equal(
        model.predict(frame.iloc[:7]), clone(estimator).fit(X, y).predict(X[:7])
    )


def polars_frames(estimator):
    pl = pytest.importorskip("polars")
    X, y = data(estimator)
    frame = pl.DataFrame({"time": X[:, 0], "depth": X[:, 1]})
    model = clone(estimator).fit(frame, pl.Series(y))
    assert list(model.feature_names_in_) == ["time", "depth"]
    np.testing.assert_array_equal(
        model.predict(frame[:7]), clone(estimator).fit(X, y).predict(X[:7])
    )


def column_transformer_with_set_output(estimator):
    pd = pytest.importorskip("pandas")
    X, y = data(estimator)
    frame = pd.DataFrame({"x": X[:, 0], "kind": np.where(X[:, 1] > 2, "high", "low")})
    columns = make_column_transformer(
        (StandardScaler(), ["x"]), (OneHotEncoder(sparse_output=False), ["kind"])
    ).set_output(transform="pandas")
    model = make_pipeline(columns, clone(estimator)).fit(frame, y)
    assert model.score(frame, y) > 0.3


def grid_search_of_the_kernel(estimator):
    X, y = data(estimator)
    grid = {"kernel": [RBF(0.5), RBF(2.0)], "optimizer": [None]}
    search = GridSearchCV(clone(estimator), grid, cv=FOLDS).fit(X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def weights_routed(estimator):
    X, y = data(estimator)
    with sklearn.config_context(enable_metadata_routing=True):
        if not hasattr(estimator, "set_fit_request") or "sample_weight" not in str(
            clone(estimator).get_metadata_routing().fit.requests
        ):
            raise Unsupported("fit takes no sample_weight, as scikit-learn's own class")
        model = clone(estimator).set_fit_request(sample_weight=True)
        if hasattr(model, "set_score_request"):
            model.set_score_request(sample_weight=True)
        weight = np.repeat([1.0, 2.0], len(y) // 2)
        scores = cross_val_score(model, X, y, cv=FOLDS, params={"sample_weight": weight})
    assert np.isfinite(scores).all()


def stacking(estimator):
    X, y = data(estimator)
    if is_classifier(estimator):
        model = StackingClassifier([("gp", clone(estimator))], LogisticRegression(), cv=2)
    else:
        model = StackingRegressor([("gp", clone(estimator))], Ridge(), cv=2)
    assert model.fit(X, y).score(X, y) > 0.5


def calibrated_or_transformed(estimator):
    X, y = data(estimator)
    if is_classifier(estimator):
        proba = CalibratedClassifierCV(clone(estimator), cv=2).fit(X, y).predict_proba(X)
        assert np.allclose(proba.sum(1), 1)
    else:
        model = TransformedTargetRegressor(clone(estimator), transformer=MinMaxScaler())
        assert model.fit(X, y).score(X, y) > 0.5


def permutation_importances(estimator):
    X, y = data(estimator)
    found = permutation_importance(clone(estimator).fit(X, y), X, y, n_repeats=2, random_state=0)
    assert found.importances_mean[0] > 0


def partial_dependences(estimator):
    X, y = data(estimator)
    found = partial_dependence(clone(estimator).fit(X, y), X, [0], grid_resolution=5)
    assert np.isfinite(found["average"]).all()


def cross_validated_predictions(estimator):
    X, y = data(estimator)
    method = "predict_proba" if is_classifier(estimator) else "predict"
    assert len(cross_val_predict(clone(estimator), X, y, cv=FOLDS, method=method)) == len(y)


def learning_curves_in_two_jobs(estimator):
    X, y = data(estimator)
    sizes = dict(train_sizes=[0.8, 1.0], shuffle=True, random_state=0)
    with joblib.parallel_config("threading", n_jobs=2):
        scores = learning_curve(clone(estimator), X, y, cv=FOLDS, **sizes)[2]
    assert np.isfinite(scores).all()


def bagging_or_several_outputs(estimator):
    X, y = data(estimator)
    if is_classifier(estimator):
        model = MultiOutputClassifier(clone(estimator)).fit(X, np.c_[y, y[::-1]])
        assert model.predict(X).shape == (len(y), 2)
    else:
        assert BaggingRegressor(clone(estimator), 2, random_state=0).fit(X, y).score(X, y) > 0.3
        model = MultiOutputRegressor(clone(estimator)).fit(X, np.c_[y, y[::-1]])
        assert model.predict(X).shape == (len(y), 2)


def feature_selection(estimator):
    X, y = data(estimator)
    selector = SequentialFeatureSelector(clone(estimator), n_features_to_select=1, cv=FOLDS)
    assert selector.fit(X, y).get_support().tolist() == [True, False]


def joblib_files(estimator):
    X, y = data(estimator)
    model, file = clone(estimator).fit(X, y), io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    np.testing.assert_array_equal(joblib.load(file).predict(X), model.predict(X))


def skops_files(estimator):
    skops = pytest.importorskip("skops.io")
    X, y = data(estimator)
    model = clone(estimator).fit(X, y)
    stored = skops.dumps(model)
    loaded = skops.loads(stored, trusted=skops.get_untrusted_types(data=stored))
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


class Unsupported(Exception):
    """What a class does not offer, and why."""


USES = [
    pandas_frames,
    polars_frames,
    column_transformer_with_set_output,
    grid_search_of_the_kernel,
    weights_routed,
    stacking,
    calibrated_or_transformed,
    permutation_importances,
    partial_dependences,
    cross_validated_predictions,
    learning_curves_in_two_jobs,
    bagging_or_several_outputs,
    feature_selection,
    joblib_files,
    skops_files,
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("make", CLASSES, ids=lambda make: make.__name__)
def test_use(make, use):
    if use is weights_routed and make.__name__.startswith("GaussianProcess"):
        pytest.skip("its fit takes no sample_weight, as that of scikit-learn's class")
    use(cheap(make))


def main():
    """Print the table."""
    warnings.simplefilter("ignore")
    for use in USES:
        cells = []
        for make in CLASSES:
            try:
                use(cheap(make))
                cells.append("yes")
            except Unsupported as reason:
                cells.append(f"no ({reason})")
            except BaseException as error:
                cells.append(f"FAILS {type(error).__name__}: {str(error)[:300]}")
        works = sum(cell == "yes" for cell in cells)
        print(f"{use.__name__.replace('_', ' '):36s} {works} of {len(CLASSES)}", flush=True)
        for make, cell in zip(CLASSES, cells, strict=True):
            if cell != "yes":
                print(f"    {make.__name__}: {cell}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

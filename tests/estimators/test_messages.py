"""What estimators say: the true cause, the value received, and what to do instead."""

import inspect
import re

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from scipy.sparse import csr_array
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, WhiteKernel
from sklearn.utils.fixes import parse_version

import skgp
from skgp.linalg import NotPositiveDefiniteError

NAMES = [name for name in skgp.__all__ if name.endswith(("Regressor", "Classifier"))]
REGRESSORS = [name for name in NAMES if name.endswith("Regressor")]
CLASSIFIERS = [name for name in NAMES if name.endswith("Classifier")]
#: Those that say what scikit-learn's say are exempt.
OWN = [name for name in NAMES if not name.startswith("GaussianProcess")]
X = np.linspace(0.0, 3.0, 20)[:, None]
Y = np.sin(X[:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_signatures_can_be_read_and_are_described(name):
    cls = getattr(skgp, name)
    for method in ("fit", "predict", "latent_mean_and_variance"):
        assert len(str(inspect.signature(getattr(cls, method)))) < 200
    entries = re.findall(r"^(\w.*?) : ", inspect.getdoc(cls), re.MULTILINE)
    described = [each for names in entries for each in names.split(", ")]
    assert not set(inspect.signature(cls).parameters).difference(described)
    assert len(described) == len(set(described))


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_without_cuda_is_told(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refuse(*args, device, **kwargs):
        raise RuntimeError(f"No driver for {device}")

    monkeypatch.setattr(torch, "empty", refuse)
    y = (Y > 0.5).astype(int) if name.endswith("Classifier") else Y
    with pytest.raises(ValueError, match="device='cuda' needs CUDA, and torch finds none"):
        getattr(skgp, name)(device="cuda").fit(X, y)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        ("rbf", r"Got 'rbf' instead\. Give an object of these classes, such as 1.0 \* RBF\(\)"),
        (RBF, r"Got <class .*RBF'> instead\. Give an object of the class: call it"),
        (RBF(-1.0), r"length_scale=-1\.0; hyper-parameters must be positive"),
        (1.0 * RBF(0.0), r"k2__length_scale=0\.0; hyper-parameters must be positive"),
        (
            RBF(1.0, (10.0, 0.1)),
            r"has \[\[10\.0, 0\.1\]\] for bounds of length_scale; give",
        ),
        (2.0 * RBF(1.0, "free"), r"for bounds of k2__length_scale; give \(low, high\).*\"fixed\""),
    ],
)
def test_a_kernel_that_is_none_is_told(name, kernel, told):
    y = (Y > 0.5).astype(int) if name.endswith("Classifier") else Y
    with pytest.raises(ValueError, match=told):
        getattr(skgp, name)(kernel).fit(X, y)


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("QSGPRegressor", {"optimizer": "adam"}, "Got 'adam' instead. Leave it at the default"),
        ("GaussianProcessRegressor", {"optimizer": "adam"}, "Got 'adam' .* Leave it at the def"),
        ("DLMGPRegressor", {"n_inducing": X[:2]}, "instead. Give a whole number of points"),
        ("SWSGPClassifier", {"dtype": np.float32}, 'instead. Give the name, such as "float32"'),
        ("VecchiaGPRegressor", {"device": 0}, 'Got 0 instead. Give a name, such as "cuda:0"'),
        ("BayesianGPRegressor", {"random_state": torch.Generator()}, "instead. Give a whole numb"),
        ("StateSpaceGPRegressor", {"covariates": ["a"]}, r"instead. Give a dict of columns and k"),
        ("QSGPClassifier", {"memory_budget": 4}, r"Got 4 instead. It is in bytes, such as 4e9"),
        ("DLMGPRegressor", {"n_gradient_samples": 0}, "Got 0 instead.$"),
    ],
)
def test_a_value_of_another_library_has_a_remedy(name, params, told):
    with pytest.raises(ValueError, match=told):
        getattr(skgp, name)(**params).fit(X, Y > 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_no_inputs_are_told(name):
    with pytest.raises(ValueError, match="X is None, which methods with inplace=True return"):
        getattr(skgp, name)().fit(None, Y > 0.5)


@pytest.mark.parametrize("name", REGRESSORS)
def test_noise_is_that_of_a_fit(name):
    with pytest.raises(NotFittedError, match=f"This {name} instance is not fitted yet"):
        getattr(skgp, name)().noise_variance_  # noqa: B018
    assert not hasattr(getattr(skgp, name)(), "noise_variance_")


TAKERS = "DLMGPRegressor, SWSGPRegressor, StateSpaceGPRegressor, VecchiaGPRegressor"


@pytest.mark.parametrize(
    ("name", "likelihood", "takers"),
    [
        ("QSGPRegressor", "poisson", TAKERS),
        ("QSGPRegressor", "student_t", TAKERS),
        ("DLMGPRegressor", "laplace", "QSGPRegressor"),
        ("SWSGPRegressor", "logit", "DLMGPClassifier, QSGPClassifier"),
    ],
)
def test_a_likelihood_of_other_estimators_names_them(name, likelihood, takers):
    with pytest.raises(ValueError, match=f"'likelihood' parameter of {name} must .*{takers}"):
        getattr(skgp, name)(likelihood=likelihood).fit(X, Y)


@pytest.mark.parametrize("name", NAMES)
def test_missing_inputs_are_found(name):
    table = pd.DataFrame({"a": X[:, 0], "b": np.where(np.isin(np.arange(20), (7, 9)), np.nan, 1.0)})
    y = (Y > 0.5).astype(int) if name.endswith("Classifier") else Y
    model = getattr(skgp, name)(optimizer=None)
    with pytest.raises(ValueError, match=r"NaN, in the column\(s\) 'b'; first in row 7 \(2 of 20"):
        model.fit(table, y)
    objects = table.astype(object).mask(table.isna(), pd.NA)
    with pytest.raises(ValueError, match=r"NaN, in the column\(s\) 'b'; first in row 7 .*Imputer"):
        model.fit(objects, y)
    with pytest.raises(ValueError, match=r"NaN, in the column\(s\) 1; first in row 7 \(2 of 20"):
        model.fit(objects.to_numpy(), y)
    model.fit(table[["a"]], y)
    with pytest.raises(ValueError, match=r"infinity.*column\(s\) 'a'; first in row 1 .*Imputer"):
        model.predict(pd.DataFrame({"a": [0.0, np.inf, 1.0]}))
    fitted = getattr(skgp, name)(optimizer=None).fit(X, y)
    for method in (lambda X: model.fit(X, y), fitted.predict):
        with pytest.raises(TypeError, match=r"Sparse data .*OneHotEncoder\(sparse_output=False\)"):
            method(csr_array(X))
    with pytest.raises(ValueError, match="rows are of one length"):
        model.fit([[1.0, 2.0], [3.0]], [0, 1])


@pytest.mark.parametrize("name", OWN)
def test_weights_by_name_are_those_of_classes(name):
    with pytest.raises(ValueError, match="got 'balanced'. Weights of classes are the class_weight"):
        getattr(skgp, name)().fit(X, Y > 0.5, sample_weight="balanced")


@pytest.mark.parametrize("name", REGRESSORS)
def test_percents_are_no_shares(name):
    model = getattr(skgp, name)(optimizer=None).fit(X, Y)
    with pytest.raises(ValueError, match="got 95. Give a share, such as 0.95"):
        model.predict_interval(X, coverage=95)
    with pytest.raises(ValueError, match="got 5. Give shares, such as 0.05"):
        model.predict_quantiles(X, 5)


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith("Classifier")])
def test_several_labels_lead_to_a_model_each(name):
    with pytest.raises(ValueError, match=rf"takes one target.*MultiOutputClassifier\({name}"):
        getattr(skgp, name)().fit(X, np.stack([Y > 0, Y > 0.5], 1))


@pytest.mark.parametrize("name", REGRESSORS)
@pytest.mark.parametrize("absent", [np.nan, None])
def test_missing_targets_lead_to_the_estimator_that_takes_them(name, absent):
    y = np.where(np.isin(np.arange(20), (7, 9)), absent, Y)  # of None an array of objects
    if name == "StateSpaceGPRegressor":
        assert np.isfinite(skgp.StateSpaceGPRegressor(optimizer=None).fit(X, y).predict(X)).all()
        return
    with pytest.raises(
        ValueError, match=r"y contains NaN; first in row 7 \(2 of 20.*StateSpaceGPRegressor takes"
    ):
        getattr(skgp, name)().fit(X, y)


@pytest.mark.parametrize("name", REGRESSORS)
def test_targets_that_are_no_numbers_are_found(name):
    model = getattr(skgp, name)()
    with pytest.raises(ValueError, match=r"y contains infinity.*; first in row 3 \(1 of 20 rows"):
        model.fit(X, np.where(np.arange(20) == 3, np.inf, Y))
    with pytest.raises(ValueError, match="y holds dates, which have no unit"):
        model.fit(X, pd.date_range("2020-01-01", periods=20))
    with pytest.raises(ValueError, match="y holds durations"):
        model.fit(X, pd.timedelta_range("1D", periods=20))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_missing_labels_are_found(name):
    text, lost = pd.Series(np.where(Y > 0.5, "yes", "no")), np.isin(np.arange(20), (7, 9))
    numbers = (text == "yes").astype(float)
    for labels in (
        numbers.mask(lost),
        numbers.astype("Int64").mask(lost),
        text.astype(object).mask(lost, None),
        text.astype("string").mask(lost),
        text.astype("category").mask(lost),
    ):
        with pytest.raises(
            ValueError, match=r"y contains NaN; first in row 7 \(2 of 20 rows\). Drop .* label.$"
        ):
            getattr(skgp, name)().fit(X, labels)


@pytest.mark.parametrize("name", NAMES)
def test_scored_targets_are_checked(name):
    y = np.where(Y > 0.5, "yes", "no") if name.endswith("Classifier") else Y
    model = getattr(skgp, name)(optimizer=None).fit(X, y)
    for scored in [model.log_predictive_density] + [model.score] * (name in OWN):
        with pytest.raises(ValueError, match=r"y contains NaN; first in row 7 \(1 of 20 rows\)"):
            scored(X, np.where(np.arange(20) == 7, None, y))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.log_predictive_density(X, y[:3])


@pytest.mark.parametrize("name", NAMES)
def test_values_under_a_mask_are_not_taken(name):
    model, lost = getattr(skgp, name)(optimizer=None), np.isin(np.arange(20), (7, 9))
    y = (Y > 0.5).astype(float) if name.endswith("Classifier") else Y
    with pytest.raises(ValueError, match=r"^X is a masked .* row 7 \(2 of 20 rows\).*X.filled"):
        model.fit(np.ma.masked_array(X, lost), y)
    with pytest.raises(ValueError, match=r"^y is a masked .* row 7 \(2 of 20 rows\).*y.filled"):
        model.fit(X, np.ma.masked_array(y, lost))
    assert len(model.fit(np.ma.masked_array(X, False), y).predict(X)) == 20


@pytest.mark.parametrize("name", NAMES)
def test_awkward_columns_of_a_data_frame_are_named(name):
    model, y = getattr(skgp, name)(), Y > 0.5 if name.endswith("Classifier") else Y
    table = pd.DataFrame({"a": Y, "b": pd.array([1, None] * 10, dtype="Int64")})
    with pytest.raises(ValueError, match=r"in the column\(s\) 'b'; first in row 1 \(10 of 20 rows"):
        model.fit(table, y)
    with pytest.raises(ValueError, match="X has no columns"):
        model.fit(table[[]], y)
    with pytest.raises(TypeError, match="sparse.to_dense"):
        model.fit(pd.DataFrame(X).astype(pd.SparseDtype(float, 0.0)), y)
    if parse_version(sklearn.__version__) >= parse_version("1.9"):
        with pytest.raises(ValueError, match="several columns of the name 'a'.*duplicated"):
            model.fit(pd.DataFrame(np.c_[Y, Y], columns=["a", "a"]), y)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [">f8", np.longdouble])
def test_numbers_that_torch_does_not_read_are_those_it_reads(name, dtype):
    y = Y > 0.5 if name.endswith("Classifier") else Y
    model = getattr(skgp, name)(optimizer=None, random_state=0)
    found = model.fit(X.astype(dtype), y).predict(X.astype(dtype))
    np.testing.assert_array_equal(found, model.fit(X, y).predict(X))


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_covariance_without_room_is_refused_with_its_size(name):
    model = getattr(skgp, name)(optimizer=None, random_state=0).fit(X[::4], Y[::4])
    model.set_params(memory_budget=3 * 8.0 * 10**2)
    model.predict(X[:10], return_cov=True)
    with pytest.raises(
        MemoryError, match=r"covariance of 20 rows takes .* Ask for fewer .* room for 10\), or rai"
    ):
        model.predict(X, return_cov=True)
    model.predict(X, return_std=True)


@pytest.mark.parametrize("name", [name for name in OWN if not name.startswith("StateSpace")])
def test_a_kernel_that_is_no_covariance_is_named(name):
    rows = np.random.default_rng(0).uniform(0, 10, (80, 2))
    periodic = ExpSineSquared(1.0, 3.0)
    y = np.sin(rows[:, 0])
    if name.endswith("Classifier"):
        y = (y > 0).astype(int)
    else:
        periodic = periodic + WhiteKernel(1e-3)
    with pytest.raises(NotPositiveDefiniteError, match="is indefinite.*ExpSineSquared.*ActiveDims"):
        getattr(skgp, name)(periodic, optimizer=None, random_state=0).fit(rows, y)


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_text_are_named(name):
    pd = pytest.importorskip("pandas")
    y = Y > 0.5 if name.endswith("Classifier") else Y
    model = getattr(skgp, name)()
    frame = pd.DataFrame({"a": Y, "town": ["Bern"] * 20})
    for X_text in (frame, frame.assign(town=pd.Categorical(frame["town"]))):
        with pytest.raises(ValueError, match="town"):
            model.fit(X_text, y)
    with pytest.raises(ValueError, match="X holds text, such as 'Bern'.*OneHotEncoder"):
        model.fit([["Bern"]] * 20, y)


@pytest.mark.parametrize("name", [name for name in NAMES if "Space" not in name])
def test_columns_of_dates_are_named(name):
    pd = pytest.importorskip("pandas")
    y = Y > 0.5 if name.endswith("Classifier") else Y
    frame = pd.DataFrame({"a": Y, "day": pd.date_range("2020-01-01", periods=20)})
    with pytest.raises(ValueError, match=r"dates in the column\(s\) 'day'.*StateSpace"):
        getattr(skgp, name)().fit(frame, y)


@pytest.mark.parametrize("name", REGRESSORS)
def test_targets_of_text_are_for_classifiers(name):
    with pytest.raises(ValueError, match="y holds text, such as 'no', .*classifier"):
        getattr(skgp, name)().fit(X, np.where(Y > 0.5, "yes", "no"))
    for text in (Y.astype(str), Y.astype(bytes)):  # numbers, but of a dtype without arithmetic
        with pytest.raises(ValueError, match=r"y holds text, .*y\.astype\(float\)"):
            getattr(skgp, name)().fit(X, text)
    model = getattr(skgp, name)().fit(X, Y)
    with pytest.raises(ValueError, match="y holds text"):
        model.log_predictive_density(X, Y.astype(str))


def test_braces_of_derived_classes_are_left():
    class Mine(skgp.QSGPRegressor):
        """One of mine.

        {device}
        {nobody}
        """

    assert "device : str" in Mine.__doc__
    assert "\n{nobody}" in Mine.__doc__

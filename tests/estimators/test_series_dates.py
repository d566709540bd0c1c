"""Dates as the times of a series: every type gives the model of the same days."""

import datetime

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import QSGPRegressor, StateSpaceGPClassifier, StateSpaceGPRegressor

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

HOURS = np.arange(0, 24 * 12, 6)  # every six hours of twelve days
ORIGIN = np.datetime64("2024-03-20")
KERNEL = Matern(2.0, nu=1.5) + WhiteKernel(0.1)


def days(hours=HOURS):
    return hours[:, None] / 24


def targets():
    rng = np.random.default_rng(0)
    return np.sin(HOURS / 20) + 0.2 * rng.standard_normal(len(HOURS))


def dates(unit, hours=HOURS):
    return (ORIGIN + hours.astype("timedelta64[h]")).astype(f"datetime64[{unit}]")


FORMS = {
    "array_ns": lambda h: dates("ns", h)[:, None],
    "array_us": lambda h: dates("us", h)[:, None],
    "array_s": lambda h: dates("s", h)[:, None],
    "array_h_flat": lambda h: dates("h", h),
    "objects": lambda h: dates("us", h).astype(object)[:, None],
    "stamps": lambda h: np.array([[pd.Timestamp(t)] for t in dates("ns", h)], dtype=object),
    "list": lambda h: [[t] for t in dates("us", h).astype(object)],
    "index": lambda h: pd.DatetimeIndex(dates("ns", h)),
    "series": lambda h: pd.Series(dates("us", h)),
    "frame": lambda h: pd.DataFrame({"when": dates("s", h)}),
    "periods": lambda h: pd.DataFrame({"when": pd.PeriodIndex(dates("ns", h), freq="6h")}),
    "period_index": lambda h: pd.PeriodIndex(dates("ns", h), freq="6h"),
    "polars": lambda h: pl.DataFrame({"when": dates("us", h)}),
    "zoned": lambda h: pd.DatetimeIndex(dates("ns", h), tz="UTC").tz_convert("Europe/Paris"),
    "polars_zoned": lambda h: pl.DataFrame({"when": dates("us", h)}).with_columns(
        pl.col("when").dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo")
    ),
}


@pytest.fixture(scope="module")
def by_days():
    return StateSpaceGPRegressor(KERNEL, max_iter=5).fit(days(), targets())


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
@pytest.mark.parametrize("form", FORMS)
def test_every_type_of_date_is_the_same_days(form, by_days):
    model = StateSpaceGPRegressor(KERNEL, max_iter=5).fit(FORMS[form](HOURS), targets())
    assert model.time_origin_ == ORIGIN
    np.testing.assert_array_equal(model.kernel_.theta, by_days.kernel_.theta)
    ahead = HOURS[-10:] + 15
    expected = by_days.predict(days(ahead), return_std=True)
    np.testing.assert_array_equal(model.predict(FORMS[form](ahead), return_std=True), expected)
    if "zoned" not in form:  # another form and resolution than those of fit
        found = model.predict(FORMS["array_us"](ahead), return_std=True)
        np.testing.assert_array_equal(found, expected)
        density = model.log_predictive_density(FORMS["array_s"](ahead), np.ones(10))
        np.testing.assert_array_equal(
            density, by_days.log_predictive_density(days(ahead), [1] * 10)
        )


def test_nanoseconds_of_centuries_keep_their_microseconds():
    stamps = np.array(["1700-01-01", "2200-12-31T23:59:59.000001"], dtype="datetime64[ns]")
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(stamps, [0.0, 1.0])
    found = model._validated(stamps, reset=False)[:, 0]
    seconds = (datetime.date(2200, 12, 31) - datetime.date(1700, 1, 1)).days * 86400 + 86399
    np.testing.assert_allclose(found, [0.0, (seconds + 1e-6) / 86400], rtol=0, atol=3e-11)


def test_later_dates_join_by_partial_fit(by_days):
    y = targets()
    model = clone(by_days).set_params(optimizer=None)
    model.partial_fit(dates("ns")[:30], y[:30]).partial_fit(pd.Series(dates("us")[30:]), y[30:])
    assert model.time_origin_ == ORIGIN
    other = clone(by_days).set_params(optimizer=None)
    other.partial_fit(days()[:30], y[:30]).partial_fit(days()[30:], y[30:])
    np.testing.assert_array_equal(model.predict(dates("s")), other.predict(days()))


@pytest.mark.parametrize("missing", [np.nan, None, pd.NA])
def test_missing_targets_of_an_index_are_left_out(missing):
    y, objects = targets(), targets().astype(object)
    y[3:9], objects[3:9] = np.nan, missing
    found = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(
        pd.DatetimeIndex(dates("ns")), objects
    )
    expected = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(days(), y)
    np.testing.assert_array_equal(found.predict(dates("ns")), expected.predict(days()))


def test_classifier_takes_dates():
    labels = np.where(np.sin(HOURS / 20) > 0, "up", "down")
    model = StateSpaceGPClassifier(Matern(2.0), optimizer=None).fit(dates("ns"), labels)
    expected = StateSpaceGPClassifier(Matern(2.0), optimizer=None).fit(days(), labels)
    frame = pd.DataFrame({"when": dates("s")})
    with pytest.warns(UserWarning, match="fitted without feature names"):
        found = model.set_output(transform="pandas").predict_proba(frame)
    assert list(found.columns) == ["down", "up"]
    np.testing.assert_array_equal(found, expected.predict_proba(days()))
    assert list(model.predict(dates("s")).index) == list(pd.DatetimeIndex(dates("s")))


@pytest.mark.parametrize(
    ("fitted", "asked", "message"),
    [
        (dates("ns"), days(), "fit had dates.*time_origin_"),
        (days(), dates("ns"), "fit had numbers as times"),
        (FORMS["zoned"](HOURS), dates("ns"), "without a time zone.*tz_localize"),
        (dates("ns"), FORMS["zoned"](HOURS), "with a time zone.*tz_localize"),
    ],
)
def test_other_times_than_those_of_fit_are_refused(fitted, asked, message):
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(fitted, targets())
    for call in (model.predict, lambda X: model.partial_fit(X, targets())):
        with pytest.raises(ValueError, match=message):
            call(asked)


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.append(dates("ns")[1:], np.datetime64("NaT")), r"NaT.*row 47.*Drop"),
        (HOURS[:, None].astype("timedelta64[h]"), "durations.*Divide them"),
        (pd.DataFrame({"a": dates("ns"), "b": dates("ns")}), "dates in 2 columns"),
        ((1.7e9 + 60 * HOURS[:, None]).astype(np.float32), "multiples of 128.*datetime64"),
        (
            np.array([*dates("us").astype(object)[1:], pd.Timestamp("2024-01-01", tz="UTC")]),
            "mixes times with and without",
        ),
        (np.array([*dates("us").astype(object)[1:], "2024"])[:, None], "to_datetime"),
        (np.array([*dates("us").astype(object)[1:], 3.5])[:, None], "is none"),
    ],
)
def test_times_that_lose_something_are_refused(X, message):
    model = StateSpaceGPRegressor(KERNEL, optimizer=None)
    with pytest.raises(ValueError, match=message):
        model.fit(X, targets())


@pytest.mark.parametrize("time", [None, 0])
def test_seconds_that_single_precision_merges_are_refused(time):
    seconds = 1.7e9 + 60.0 * np.arange(len(HOURS))[:, None]
    X = np.hstack([seconds, np.ones_like(seconds)]) if time == 0 else seconds
    model = StateSpaceGPRegressor(KERNEL, time=time, optimizer=None)
    with pytest.raises(ValueError, match="multiples of 128: 23 of 48 are left.*float64"):
        model.fit(X.astype(np.float32), targets())
    model.fit(X, targets())
    with pytest.raises(ValueError, match="multiples of 128"):
        model.predict(X.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_nanoseconds_that_double_precision_merges_are_refused(dtype):
    time = 1_700_000_000_000_000_000 + 30 * np.arange(len(HOURS), dtype=dtype)[:, None]
    model = StateSpaceGPRegressor(KERNEL, optimizer=None)
    with pytest.raises(ValueError, match="which float64 rounds to multiples of 256: 7 of 48 are"):
        model.fit(time, targets())
    model.fit(1000 * (time - time[0]) + time[0], targets())
    model.fit((100 * (time % 2) - 50).astype(np.int8), targets())  # whose range is beyond int8


def test_single_precision_near_zero_is_taken():
    X = days().astype(np.float32)
    found = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, targets())
    assert not hasattr(found, "time_origin_")


@pytest.mark.parametrize("form", ["index", "frame", "array_ns"])
def test_predictions_have_the_index_of_their_rows(form):
    X = FORMS[form](HOURS)
    if form == "frame":
        X.index = [f"row {i}" for i in range(len(X))]
    model = StateSpaceGPRegressor(KERNEL + Matern(9.0, nu=0.5), optimizer=None)
    model = clone(model.set_output(transform="pandas")).fit(X, targets())
    plain = clone(model).set_output(transform="default").fit(X, targets())
    index = X.index if form == "frame" else pd.DatetimeIndex(dates("ns"))
    mean, std = model.predict(X, return_std=True)
    lower, upper = model.predict_interval(X)
    quantiles = model.predict_quantiles(X, [0.1, 0.9])
    parts, spread = model.predict_components(X, return_std=True)
    for each in (mean, std, lower, upper, quantiles, parts, spread):
        assert list(each.index) == list(index)
    assert (mean.name, std.name, lower.name, upper.name) == ("mean", "std", "lower", "upper")
    assert list(quantiles.columns) == [0.1, 0.9]
    assert list(parts.columns) == [str(kernel) for kernel in model.component_kernels_]
    np.testing.assert_array_equal(mean, plain.predict(X))
    np.testing.assert_array_equal(np.array([lower, upper]), plain.predict_interval(X))
    assert model.score(X, targets()) == plain.score(X, targets())


def test_polars_gets_polars():
    X = FORMS["polars"](HOURS)
    model = StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, targets())
    found = model.set_output(transform="polars").predict_quantiles(X, [0.1, 0.9])
    assert isinstance(found, pl.DataFrame) and found.columns == ["0.1", "0.9"]
    with pytest.raises(ValueError, match="transform must be"):
        model.set_output(transform="numpy")


def test_no_rows_are_told():
    with pytest.raises(ValueError, match="0 rows"):
        StateSpaceGPRegressor().fit(pd.DataFrame({"when": pd.DatetimeIndex([])}), [])


@pytest.mark.parametrize("first", [None, np.nan, pd.NaT, pd.NA])
@pytest.mark.parametrize("form", ["array", "list", "rows", "frame", "rows_of_two"])
def test_a_missing_first_time_does_not_hide_that_the_others_are_dates(first, form):
    values = [first, *dates("us").astype(object)[1:]]
    X = {
        "array": lambda: np.array(values, dtype=object),
        "list": lambda: values,
        "rows": lambda: [[value] for value in values],
        "frame": lambda: pd.DataFrame({"when": pd.Series(values, dtype=object)}),
        "rows_of_two": lambda: [[value, 1.0] for value in values],
    }[form]()
    with pytest.raises(ValueError, match=r"NaT.*row 0 \(1 of 48"):
        StateSpaceGPRegressor(KERNEL, optimizer=None).fit(X, targets())


@pytest.mark.parametrize("regressor", [StateSpaceGPRegressor, QSGPRegressor])
@pytest.mark.parametrize("form", ["array_ns", "series", "objects", "periods", "polars", "zoned"])
def test_dates_as_targets_are_refused(regressor, form):
    y = FORMS[form](HOURS)
    y = y["when"] if form in ("periods", "polars") else y[:, 0] if np.ndim(y) == 2 else y
    model = regressor()
    for targets in (y, list(y)):
        with pytest.raises(ValueError, match="y holds dates.*days since"):
            model.fit(days(), targets)
    with pytest.raises(ValueError, match="y holds durations.*Divide them"):
        model.fit(days(), HOURS.astype("timedelta64[h]"))


@pytest.mark.parametrize("form", [pd.date_range, pd.period_range])
@pytest.mark.parametrize("columns", [["a"], ["a", "b"]])
def test_dates_in_the_index_are_not_ignored_silently(form, columns):
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 2)), columns=["a", "b"])[columns]
    X.index = form("2024-01-01", periods=30, freq="D", name="day")
    model = StateSpaceGPRegressor(KERNEL, optimizer=None)
    with pytest.warns(UserWarning, match=r"dates in its index.*reset_index\(\), and name it by ti"):
        model.fit(X, np.arange(30.0))


@pytest.mark.parametrize("time", ["a", "day", None])
def test_times_that_are_named_need_no_index(time, recwarn):
    X = pd.DataFrame({"a": np.arange(30.0)}, index=pd.date_range("2024-01-01", periods=30))
    X = X if time == "a" else X.rename_axis("day").reset_index()
    StateSpaceGPRegressor(KERNEL, time=time, optimizer=None).fit(X, np.arange(30.0))
    assert not recwarn

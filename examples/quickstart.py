"""Fit QSGPRegressor with its defaults on real data and score it on rows it has not seen.

Without arguments the data are scikit-learn's diabetes set (442 patients, 10 columns), which needs
no download. With ``--data file.csv --target column`` they are yours:

- a first line of column names; commas, semicolons, tabs or bars between the fields;
- columns of numbers are used as they are, their missing values replaced by the median and marked;
- columns of text with at most 30 different values become one column a value, others are left out;
- rows without a target are left out.

It prints RMSE, NLPD, the coverage of the 95% intervals and seconds, and writes predictions.png.
"""

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import OneHotEncoder

from skgp import QSGPRegressor

MISSING = {"", "?", "na", "n/a", "nan", "null", "none"}
MAX_CATEGORIES = 30
MIN_ROWS = 20
COVERAGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])


class Table(NamedTuple):
    """Columns of numbers (NaN where missing) and of text, and the target, row by row."""

    name: str
    numbers: np.ndarray  # (n, p) float64
    text: np.ndarray  # (n, q) object
    y: np.ndarray  # (n,) float64


def main() -> None:
    """Read the data, fit on four fifths of the rows, score and draw the rest."""
    args = parse_arguments()
    table = read_csv(args.data, args.target) if args.data else diabetes()
    X_train, X_test, y_train, y_test = split(table)
    shape = f"{len(y_train)} training points, {len(y_test)} test points, {X_train.shape[1]} columns"
    print(f"{table.name}: {shape}")
    start = time.perf_counter()
    model = QSGPRegressor(random_state=0).fit(X_train, y_train)
    seconds_to_fit = time.perf_counter() - start
    start = time.perf_counter()
    report(model, X_test, y_test, y_train)
    seconds_to_predict = time.perf_counter() - start
    print(
        f"seconds                   {seconds_to_fit:.2f} to fit, {seconds_to_predict:.2f} to score"
    )
    draw(model, X_test, y_test, args.picture)
    print(f"picture                   {args.picture}")


def parse_arguments() -> argparse.Namespace:
    """``--data``, ``--target``, ``--picture``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="CSV file with a line of column names")
    parser.add_argument("--target", help="name of the column to predict, which holds numbers")
    parser.add_argument("--picture", type=Path, default=Path("predictions.png"))
    args = parser.parse_args()
    if (args.data is None) != (args.target is None):
        parser.error("--data and --target (DATA= and TARGET= of make) go together: give both")
    return args


def diabetes() -> Table:
    """The set that scikit-learn carries: disease progression after one year."""
    X, y = load_diabetes(return_X_y=True, scaled=False)
    return Table("diabetes", X, np.empty((len(y), 0), dtype=object), y)


def read_csv(path: Path, target: str) -> Table:
    """Sort the columns of a CSV file into numbers, text and the target; say what is left out."""
    header, rows, decimal = read_rows(path)
    if header.count(target) != 1:
        names = ", ".join(map(repr, header))
        sys.exit(f"{path}: TARGET must name one column, got {target!r}; the columns are {names}")
    values = dict(enumerate(zip(*rows, strict=True)))
    y = as_numbers(values.pop(header.index(target)), decimal)
    if y is None:
        sys.exit(
            f"{path}: TARGET must be a column of numbers and {target!r} holds text; "
            "encode it as numbers, or give another column"
        )
    numbers, text = [], []
    for position, column in values.items():
        parsed = as_numbers(column, decimal)
        levels = len(set(column)) if parsed is None else len(np.unique(parsed[~np.isnan(parsed)]))
        if levels < 2:
            print(f"left out: column {header[position]!r} is constant")
        elif parsed is not None:
            numbers.append(parsed)
        elif levels <= MAX_CATEGORIES:
            text.append(column)
        else:
            print(f"left out: column {header[position]!r} is text with {levels} different values")
    if not numbers and not text:
        sys.exit(f"{path}: no column is left to predict {target!r} from; encode some of the above")
    n, known = len(y), ~np.isnan(y)
    if not known.all():
        print(f"left out: {n - known.sum()} rows without a value of {target!r}")
    if known.sum() < MIN_ROWS:
        sys.exit(f"{path}: {known.sum()} rows have a target, {MIN_ROWS} are needed; give more")
    X_numbers = np.array(numbers, dtype=float).reshape(-1, n).T
    X_text = np.array(text, dtype=object).reshape(-1, n).T
    return Table(path.name, X_numbers[known], X_text[known], y[known])


def read_rows(path: Path) -> tuple[list[str], list[list[str]], str]:
    """Header, rows of stripped fields, and the decimal mark."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.readlines()
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}; give another file")
    except UnicodeDecodeError as error:
        sys.exit(f"{path}: not readable as UTF-8 text ({error}); save it as UTF-8")
    if len(lines) < 1 + MIN_ROWS:
        sys.exit(
            f"{path}: a line of column names and at least {MIN_ROWS} rows of values are needed, "
            f"got {len(lines)} lines; give more"
        )
    delimiter = max(",;\t|", key=lines[0].count)
    table = [[field.strip() for field in row] for row in csv.reader(lines, delimiter=delimiter)]
    header, rows = table[0], [row for row in table[1:] if any(row)]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            sys.exit(
                f"{path}: row {number} has {len(row)} fields and the line of names {len(header)}; "
                "put quotes around fields that hold the delimiter"
            )
    # Where fields are parted by semicolons, a comma is the decimal mark.
    return header, rows, "," if delimiter == ";" else "."


def as_numbers(column: Sequence[str], decimal: str) -> np.ndarray | None:
    """The column as float64, NaN where missing or infinite; None if some value is text."""
    numbers = np.full(len(column), np.nan)
    for row, field in enumerate(column):
        if field.lower() not in MISSING:
            try:
                numbers[row] = float(field.replace(decimal, "."))
            except ValueError:
                return None
    return np.where(np.isinf(numbers), np.nan, numbers)


def split(table: Table) -> list[np.ndarray]:
    """``X_train, X_test, y_train, y_test``, a fifth for the test; encoded by the training part."""
    train, test = train_test_split(np.arange(len(table.y)), test_size=0.2, random_state=0)
    parts = []
    if table.numbers.shape[1]:
        imputer = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        parts.append((imputer.fit(table.numbers[train]), table.numbers))
    if table.text.shape[1]:
        encoder = OneHotEncoder(sparse_output=False, handle_unknown="ignore")
        parts.append((encoder.fit(table.text[train]), table.text))
    X_train, X_test = (
        np.hstack([encoder.transform(columns[rows]) for encoder, columns in parts])
        for rows in (train, test)
    )
    return [X_train, X_test, table.y[train], table.y[test]]


def report(model: QSGPRegressor, X: np.ndarray, y: np.ndarray, y_train: np.ndarray) -> None:
    """Print the scores beside those of the normal distribution fitted to the training target."""
    mean, std = y_train.mean(), y_train.std()
    rmse = np.sqrt(np.mean((y - model.predict(X)) ** 2))
    nlpd = -model.log_predictive_density(X, y).mean()
    lower, upper = model.predict_interval(X, coverage=0.95)
    plain_rmse = np.sqrt(np.mean((y - mean) ** 2))
    plain_nlpd = 0.5 * np.log(2 * np.pi * std**2) + 0.5 * np.mean((y - mean) ** 2) / std**2
    print(f"solver                    {model.solver_}, basis {model.basis_}")
    print(f"RMSE                      {rmse:.4g}   (of the mean alone {plain_rmse:.4g})")
    print(f"NLPD, nats per point      {nlpd:.4g}   (of one normal distribution {plain_nlpd:.4g})")
    print(f"coverage of 95% intervals {np.mean((lower <= y) & (y <= upper)):.1%}")


def draw(model: QSGPRegressor, X: np.ndarray, y: np.ndarray, path: Path) -> None:
    """Observed against predicted with 95% intervals, and the coverage of intervals of any size."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window: this also runs where there is no display
    import matplotlib.pyplot as plt

    shown = slice(0, 300)  # more bars than this are one blot
    mean = model.predict(X[shown])
    lower, upper = model.predict_interval(X[shown], coverage=0.95)
    intervals = [model.predict_interval(X, coverage=level) for level in COVERAGES]
    covered = [np.mean((low <= y) & (y <= high)) for low, high in intervals]

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    bars = [np.maximum(mean - lower, 0), np.maximum(upper - mean, 0)]
    left.errorbar(mean, y[shown], xerr=bars, fmt="o", ms=3, lw=0.7, alpha=0.6)
    left.axline((y.mean(), y.mean()), slope=1, color="black", lw=1)
    left.set(xlabel="predicted, with 95% interval", ylabel="observed", title="Test points")
    right.plot([0, 1], [0, 1], color="black", lw=1)
    right.plot(COVERAGES, covered, "o-")
    right.set(xlabel="asked for", ylabel="found", title="Coverage of the intervals")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()

"""VecchiaGPClassifier beside QSGPClassifier and SWSGPClassifier, all by defaults.

Run with ``python -m tests.benchmarks.bench_vecchia_classes SET N SPLIT [vecchia qsgp swsgp]``:
errors, mean negative log-probabilities of up to 10000 test rows, and seconds of the processor in
one thread, of fits to N training rows at random. Sets of labels are as they are ("mnist10" the
digits), MNIST odd or even, flights late or not, and other targets above their median or not.
"rare" is 2% of 1000 rows, of seed SPLIT (:mod:`tests.benchmarks.bench_rare_class`).
"""

import sys

import numpy as np

import skgp
from tests.benchmarks.bench_rare_class import rare_labels
from tests.benchmarks.data import seconds_of, split_of

PEERS = {"vecchia": "VecchiaGPClassifier", "qsgp": "QSGPClassifier", "swsgp": "SWSGPClassifier"}
LABELS = {
    "mnist": lambda y, train: y % 2,
    "flights_nyc13": lambda y, train: y > 0,
    "kin40k": lambda y, train: y > np.median(train),
}


def problem(name, n, split):
    """Standardised training and test inputs, and labels of both."""
    if name == "rare":
        X, y, X_test, y_test, _ = rare_labels(split)
        return X, X_test, y, y_test
    images = name in ("mnist", "mnist10")
    X, X_test, y, y_test = split_of("mnist" if images else name, 0 if images else split)
    label = LABELS.get(name, lambda y, train: y)
    y, y_test = (label(each, y).astype(int) for each in (y, y_test))
    rows = np.random.default_rng(split).permutation(len(X))[:n]
    test = np.random.default_rng(split).permutation(len(X_test))[:10_000]
    mean, std = X.mean(0), X.std() if images else X.std(0)
    scaled = (X[rows] - mean) / std, (X_test[test] - mean) / std
    return *scaled, y[rows], y_test[test]


def main(name, n, split, *peers):
    """Print a line each."""
    X, X_test, y, y_test = problem(name, int(n), int(split))
    for peer in peers or PEERS:
        model = getattr(skgp, PEERS[peer])(random_state=0, n_jobs=1)
        fit = seconds_of(lambda model=model: model.fit(X, y))[1]
        log_proba, predict = seconds_of(lambda model=model: model.predict_log_proba(X_test))
        codes = np.searchsorted(model.classes_, y_test)
        loss = -log_proba[np.arange(len(codes)), codes].mean()
        print(
            f"{name} {n} {split} {peer}: error {np.mean(log_proba.argmax(1) != codes):.4f}, "
            f"NLL {loss:.4f}, fit {fit:.1f} s, {len(codes)} predictions {predict:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Awkward but legal ways to call an estimator, as Hypothesis strategies: see `cases`.

A `Case` is a short description that Hypothesis can shrink and print; `Case.data` and `Case.make`
turn it into arrays and an estimator. What is drawn is meant to be what users bring: columns of any
scale, repeated rows, far outliers, constant targets, every documented value of every parameter.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Integral, Real

import numpy as np
from hypothesis import strategies as st
from sklearn.gaussian_process.kernels import (
    RBF,
    CompoundKernel,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    PairwiseKernel,
    RationalQuadratic,
    WhiteKernel,
)

import skgp

#: Every estimator with what its fit may cost at most here.
ESTIMATORS = {
    "QSGPRegressor": {},
    "QSGPClassifier": {},
    "DLMGPRegressor": {"max_iter": 8},
    "DLMGPClassifier": {"max_iter": 8},
    "SWSGPRegressor": {},
    "SWSGPClassifier": {},
    "StateSpaceGPRegressor": {"max_iter": 4},
    "StateSpaceGPClassifier": {"max_iter": 4},
    "VecchiaGPRegressor": {},
    "VecchiaGPClassifier": {},
    "BayesianGPRegressor": {"n_samples": 64, "n_keep": 8, "n_warmup": 5},
}

#: Values of the parameters that are numbers; of strings and booleans every value is drawn.
_NUMBERS = {
    "basis_batch_size": [1, 7],
    "batch_size": [1, 7],
    "beta": [0.0, 0.1, 10.0],
    "degrees_of_freedom": [0.5, 3.0],
    "kl_weight": [0.5],
    "learning_rate": [1e-3, 0.5],
    "max_iter": [1, 4],
    "memory_budget": [2.0**24],
    "min_ess": [50],
    "n_basis": [1, 7, 100],
    "n_chains": [1, 3],
    "n_dense_columns": [1, 5],
    "n_gradient_samples": [1, 3],
    "n_inducing": [2, 5, 1000],
    "n_jobs": [1],  # two threads on so few rows wait for each other: tests/linalg/test_runtime.py
    "n_keep": [1, 5],
    "n_neighbors": [1, 3, 1000],
    "n_probes": [1, 2],
    "n_samples": [64],
    "n_support": [0, 5],
    "n_warmup": [5],
    "preconditioner_rank": [0, 3],
    "projection": [1, 2],
    "time": [0],
    "tol": [1e-2],
    "trend": [0, 2],
    "validation_fraction": [0.3],
}
#: What needs a package that is not there.
_MISSING = {} if find_spec("faiss") else {"neighbors": {"faiss"}}
_NOT_DRAWN = {"kernel", "prior", "random_state", "device", "verbose"}
#: Solvers and samplers that take thousands of steps by default.
_CHAIN = {"n_samples": 16, "n_chains": 1, "n_warmup": 5}
_LONG = {
    "sgd": {"max_iter": 30},
    "adam": {"max_iter": 10},
    "learned": {"max_iter": 20},
    "hmc": {"n_samples": 32, "min_ess": 8},
    **dict.fromkeys(["cg", "langevin", "mala", "sgld"], _CHAIN),
}

#: Signal and noise by the number of columns; a classifier has no noise.
KERNELS = {
    "rbf": lambda d: (1.0 * RBF(1.0), None),
    "ard": lambda d: (1.0 * RBF(np.ones(d)), WhiteKernel(0.1)),
    "matern12": lambda d: (Matern(nu=0.5), None),
    "matern32": lambda d: (2.0 * Matern(0.5, nu=1.5), WhiteKernel(0.1)),
    "matern52": lambda d: (1.0 * Matern(nu=2.5), None),
    "rational": lambda d: (RationalQuadratic(), None),
    "linear": lambda d: (DotProduct() + RBF(), None),
    "periodic": lambda d: (1.0 * ExpSineSquared(), WhiteKernel()),
    "product": lambda d: (Matern(nu=1.5) * RBF(3.0), WhiteKernel(1e-3)),
    "fixed": lambda d: (1.0 * RBF(1.0, "fixed"), WhiteKernel(0.1, "fixed")),
    "equal bounds": lambda d: (1.0 * RBF(1.0, (1.0, 1.0)), WhiteKernel(0.1, (0.1, 0.1))),
    "narrow bounds": lambda d: (1.0 * RBF(1.0, (0.99, 1.01)), WhiteKernel(0.1, (0.05, 0.2))),
    "all noise": lambda d: (1.0 * RBF(1.0), WhiteKernel(1e5, (1e5, 1e6))),
    "noise-free": lambda d: (1.0 * RBF(1.0), WhiteKernel(1e-10, "fixed")),
    "compound": lambda d: (CompoundKernel([RBF(), RBF(2.0)]), None),
    "pairwise": lambda d: (PairwiseKernel(), None),
}
#: A search over these bounds takes every step of one, and few of them.
NARROW = "narrow matern32"
_NARROW_KERNEL = (
    ConstantKernel(2.0, (1.9, 2.1)) * Matern(0.5, (0.45, 0.55), nu=1.5),
    WhiteKernel(0.1, (0.09, 0.11)),
)
#: Kernels that some estimators may refuse.
REFUSABLE_KERNELS = {"ard", "compound", "pairwise", "periodic", "linear", "rational", "product"}

DEFECTS = [
    "constant column",
    "duplicated column",
    "repeated rows",
    "all rows equal",
    "offset 1e9",
    "scale 1e-12",
    "scale 1e12",
    "mixed scales",
    "far row 1e6",
    "far row 1e10",
    "far row 1e200",
    "far row 1e300",
]
#: With these an estimator may ask for other data instead.
REFUSABLE_DEFECTS = {"far row 1e200", "far row 1e300"}
NUMERIC_TARGETS = ["smooth", "constant", "two values", "outlier", "offset 1e9", "tiny", "huge"]
CLASS_TARGETS = ["two", "strings", "three", "rare", "one", "singleton"]
WEIGHTS = ["none", "none", "none", "ones", "some zero", "extreme", "one row"]
LAYOUTS = ["C", "F", "strided", "read-only", "float32", "integers", "lists", "DataFrame"]


@dataclass(frozen=True)
class Case:
    """One way to call one estimator.

    Parameters
    ----------
    estimator : str
        Name of the class.
    params : tuple of (str, object)
        Parameters that differ from `ESTIMATORS`.
    kernel : str
        Key of `KERNELS`, or "default" for none.
    n, d : int
        Rows and columns of X.
    defects : frozenset of str
        What is awkward about X.
    target, weight, layout : str
        What y, the sample weights and the memory of X are like.
    seed : int
    """

    estimator: str
    params: tuple
    kernel: str
    n: int
    d: int
    defects: frozenset
    target: str
    weight: str
    layout: str
    seed: int

    @property
    def is_classifier(self):
        return self.estimator.endswith("Classifier")

    @property
    def is_ill_conditioned(self):
        """Whether weights span 16 orders, or a linear kernel sums numbers of unlike size."""
        unlike = ("scale", "mixed", "offset", "far")
        return self.weight == "extreme" or (
            self.kernel == "linear" and any(name.startswith(unlike) for name in self.defects)
        )

    @property
    def counts(self):
        return dict(self.params).get("likelihood") == "poisson"

    @property
    def of_log(self):
        return dict(self.params).get("likelihood") == "lognormal"

    def make(self, **params):
        """Return the unfitted estimator."""
        estimator = getattr(skgp, self.estimator)()
        chosen = {**ESTIMATORS[self.estimator]}
        for _, value in self.params:
            short = _LONG.get(value, {}) if isinstance(value, str) else {}
            chosen.update({name: short[name] for name in short if hasattr(estimator, name)})
        chosen.update(self.params)
        chosen.update(params, kernel=self._kernel(), random_state=self.seed)
        return estimator.set_params(**chosen)

    def _kernel(self):
        if self.kernel == "default":
            return None
        signal, noise = _NARROW_KERNEL if self.kernel == NARROW else KERNELS[self.kernel](self.d)
        return signal if noise is None or self.is_classifier or self.counts else signal + noise

    def data(self):
        """Return X (n, d), y (n,) and the sample weights (n,) or None."""
        rng = np.random.default_rng(self.seed)
        clean = rng.uniform(-2, 2, (self.n, self.d))
        f = np.sin(clean[:, 0]) + 0.5 * clean[:, -1] + 0.1 * rng.standard_normal(self.n)
        X = self._with_defects(clean, rng)
        y = self._classes(f, rng) if self.is_classifier else self._numbers(f, rng)
        return self._in_layout(X), y, self._weights(rng)

    def _with_defects(self, X, rng):
        X = X.copy()
        # Far rows last, and not scaled.
        for defect in sorted(self.defects, key=lambda name: (name.startswith("far"), name)):
            match defect.split():
                case ["constant", "column"]:
                    X[:, 0] = 3.0
                case ["duplicated", "column"]:
                    X[:, -1] = X[:, 0]
                case ["repeated", "rows"]:
                    X[self.n // 2 :] = X[: self.n - self.n // 2]
                case ["all", "rows", "equal"]:
                    X[:] = X[0]
                case ["mixed", "scales"]:
                    X *= 10.0 ** rng.integers(-12, 13, self.d)
                case ["offset", size]:
                    X += float(size)
                case ["scale", size]:
                    X *= float(size)
                case ["far", "row", size]:
                    X[-1] = float(size)
        return X

    def _numbers(self, f, rng):
        if self.counts:
            return rng.poisson(np.exp(np.clip(f, -3, 3))).astype(float)
        if self.of_log:
            return np.exp(f)
        match self.target:
            case "constant":
                return np.full(self.n, 3.7)
            case "two values":
                return np.where(f > 0, 1.0, -1.0)
            case "outlier":
                return np.where(np.arange(self.n) == self.n // 2, 1e6, f)
            case "offset 1e9":
                return f + 1e9
            case "tiny":
                return 1e-12 * f
            case "huge":
                return 1e12 * f
        return f

    def _classes(self, f, rng):
        match self.target:
            case "strings":
                return np.where(f > 0, "yes", "no")
            case "three":
                return np.digitize(f, [-0.7, 0.7])
            case "rare":
                return (np.arange(self.n) < max(1, self.n // 200)).astype(int)
            case "one":
                return np.ones(self.n, int)
            case "singleton":
                return np.where(np.arange(self.n) == 0, 2, f > 0)
        return (f > 0).astype(int)

    def _weights(self, rng):
        match self.weight:
            case "ones":
                return np.ones(self.n)
            case "some zero":
                return np.where(np.arange(self.n) % 3 == 1, 0.0, rng.uniform(0.5, 2, self.n))
            case "extreme":
                return 10.0 ** rng.integers(-8, 9, self.n)
            case "one row":
                return (np.arange(self.n) == 0).astype(float)
        return None

    def _in_layout(self, X):
        match self.layout:
            case "F":
                return np.asfortranarray(X)
            case "strided":
                return np.repeat(np.repeat(X, 2, axis=0), 2, axis=1)[::2, ::2]
            case "read-only":
                X.setflags(write=False)
            case "float32":
                with np.errstate(over="ignore"):
                    X32 = X.astype(np.float32)
                return X32 if np.isfinite(X32).all() else X
            case "integers":
                return np.round(X).astype(np.int64) if np.abs(X).max() < 1e18 else X
            case "lists":
                return X.tolist()
            case "DataFrame":
                import pandas

                return pandas.DataFrame(X, columns=[f"column {j}" for j in range(self.d)])
        return X


def documented_values(estimator):
    """Return, by parameter, the values that its constraints name and those of `_NUMBERS`."""
    values = {}
    for name, constraints in getattr(skgp, estimator)._parameter_constraints.items():
        if name in _NOT_DRAWN or constraints == "no_validation":
            continue
        unwanted = _MISSING.get(name, ())
        found = list(_NUMBERS.get(name, []))
        for constraint in constraints:
            if constraint == "boolean":
                found += [False, True]
            elif constraint is None:
                found.append(None)
            elif hasattr(constraint, "options"):
                found += sorted(set(constraint.options).difference(unwanted))
            elif constraint is dict:
                pass
            else:
                numbers = constraint in (Integral, Real) or hasattr(constraint, "left")
                assert not numbers or name in _NUMBERS, f"give values of {name}"
        if found:
            values[name] = found
    return values


def cases(estimator, *, params=2, defects=2):
    """Return the strategy of the cases of one estimator.

    At most ``params`` parameters and ``defects`` defects at once: what they do together is rarely
    the first thing to go wrong, and shrinking stays quick.
    """
    values = documented_values(estimator)
    pairs = st.sampled_from(sorted(values)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(values[name]))
    )
    is_classifier = estimator.endswith("Classifier")
    return st.builds(
        Case,
        estimator=st.just(estimator),
        params=st.lists(pairs, max_size=params, unique_by=lambda p: p[0]).map(tuple),
        kernel=st.sampled_from(["default", "default", *KERNELS]),
        n=st.sampled_from([20, 30, 12, 5, 3, 2, 1]),
        d=st.sampled_from([2, 1, 3, 40]),
        defects=st.frozensets(st.sampled_from(DEFECTS), max_size=defects),
        target=st.sampled_from(CLASS_TARGETS if is_classifier else NUMERIC_TARGETS),
        weight=st.sampled_from(WEIGHTS),
        layout=st.sampled_from(LAYOUTS),
        seed=st.integers(0, 2**16),
    )


def plain_cases(estimator, kernels):
    """Return the strategy of the cases of one estimator that nothing is awkward about."""
    is_classifier = estimator.endswith("Classifier")
    return st.builds(
        Case,
        estimator=st.just(estimator),
        params=st.just(()),
        kernel=st.sampled_from(kernels),
        n=st.sampled_from([20, 30]),
        d=st.sampled_from([2, 1, 3]),
        defects=st.just(frozenset()),
        target=st.sampled_from(["two", "three"] if is_classifier else ["smooth", "huge"]),
        weight=st.sampled_from(["none", "some zero"]),
        layout=st.just("C"),
        seed=st.integers(0, 2**16),
    )

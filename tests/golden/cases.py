"""Which fits the golden record holds: `CASES`, by estimator, from ``cases.txt``."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

import skgp
from skgp.kernels import ActiveDims, Cosine
from skgp.priors import Gamma, HalfNormal

_NOISE = WhiteKernel(0.1)
_PRIORS = {"gamma": Gamma(2.0, 1.0), "half-normal": HalfNormal(2.0)}
#: Signals; `_kernel` adds the noise where there is some.
_KERNELS = {
    "rbf": lambda d: 1.0 * RBF(1.0),
    "ard": lambda d: 1.0 * RBF(np.ones(d)),
    "fixed": lambda d: 1.0 * RBF(1.5, "fixed"),
    "bounded": lambda d: ConstantKernel(1.0, (0.5, 2.0)) * RBF(1.0, (0.8, 1.2)),
    "matern12": lambda d: 1.0 * Matern(nu=0.5),
    "matern32": lambda d: 1.0 * Matern(np.ones(d), nu=1.5),
    "matern52": lambda d: 1.0 * Matern(nu=2.5),
    "rational": lambda d: 1.0 * RationalQuadratic(),
    "linear": lambda d: DotProduct() + RBF(1.0),
    "periodic": lambda d: 1.0 * ExpSineSquared(periodicity=1.0) + 1.0 * Matern(5.0, nu=1.5),
    "cosine": lambda d: 1.0 * Matern(3.0, nu=2.5) * Cosine(1.0) + 1.0 * RBF(5.0),
    "product": lambda d: 1.0 * RBF(2.0) * RationalQuadratic(3.0),
    "sum": lambda d: 1.0 * RBF(2.0) + 0.5 * Matern(0.5, nu=1.5),
    "columns": lambda d: 1.0 * ActiveDims(Matern(nu=2.5), [0]) + 1.0 * ActiveDims(RBF(), [d - 1]),
}


@dataclass(frozen=True)
class GoldenCase:
    """One fit: the names of an estimator and a problem, and the options other than defaults.

    ``calls`` is how the rows are given: "fit", "refit" (twice, with ``warm_start``) or "parts" (by
    ``partial_fit``).
    """

    estimator: str
    problem: str
    options: tuple
    calls: str = "fit"

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.problem}, {self.calls}({options})"

    def make(self, d: int, **more):
        """Return the unfitted estimator for inputs of d columns, with `more` options."""
        options = dict(self.options)
        if "kernel" in options:
            noise = not self.estimator.endswith("Classifier") and (
                options.get("likelihood") in (None, "gaussian", "laplace", "student_t")
            )
            signal = _KERNELS[options["kernel"]](d)
            options["kernel"] = signal + _NOISE if noise else signal
        if "prior" in options:
            options["prior"] = _PRIORS[options["prior"]]
        if self.calls == "refit":
            options["warm_start"] = True
        options = {"random_state": 0, "device": "cpu"} | options | more
        return getattr(skgp, self.estimator)(**options)


def read_cases(text: str) -> dict[str, list[GoldenCase]]:
    """Return the cases of each estimator from lines such as those of ``cases.txt``."""
    cases: dict[str, list[GoldenCase]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            estimator = line.strip("[]")
            cases[estimator] = []
        elif line and not line.startswith("#"):
            named, _, options = line.partition(":")
            name, _, calls = named.partition("/")
            pairs = (option.split("=") for option in options.split())
            values = tuple((option, _value(text)) for option, text in pairs)
            cases[estimator].append(GoldenCase(estimator, name, values, calls or "fit"))
    return cases


def _value(text: str):
    """Return the number, None or boolean that a text names, else the text."""
    named = {"None": None, "True": True, "False": False}
    if text in named:
        return named[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


CASES = read_cases(Path(__file__).with_name("cases.txt").read_text())

"""Estimator x route x (fit, predict) on the pretended device: equal, transfers, synchronisations.

::

    python -m tests.devices.table --only QSGPRegressor --match fourier

A line for each case of the golden record: the largest relative difference from the CPU over all
attributes and predictions (those after pickling included), then of the fit and of all prediction
methods together the transfers to the device and from it, and the synchronisations. What fails has
its error in place of these. The exit status is the number of cases that differ or fail, at most 99.
"""

import argparse
import sys
import traceback

import torch

from tests.devices.common import EQUAL, REAL, Account, Device, account
from tests.golden.cases import CASES

_COLUMNS = ("to_device", "to_host", "synchronisations")
_PRETENDED = Device()


def line(done: Account) -> str:
    """One line of the table, without the name of the case."""
    counts = (f"{done.fit[c]:6d}" for c in _COLUMNS), (f"{done.predict[c]:6d}" for c in _COLUMNS)
    equal = "equal" if done.worst <= EQUAL else f"{done.worst:.0e}"
    return f"{equal:>6} |{''.join(counts[0])} |{''.join(counts[1])}"


def main() -> int:
    """Print the table; return the number of cases that are not as on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--match", default="", help="cases whose text contains this")
    parser.add_argument("--real", action="store_true", help="on the CUDA device of this machine")
    parser.add_argument("--trace", action="store_true", help="with the traceback of errors")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    faults = 0
    print(" equal | fit: in   out  sync | predict    out  sync |")
    for estimator in chosen.only:
        for case in (case for case in CASES[estimator] if chosen.match in str(case)):
            try:
                done = account(case, REAL if chosen.real else _PRETENDED)
                text, wrong = line(done), done.worst > EQUAL
                if chosen.real:
                    text, wrong = f"{text} {done.distance:8.1e} std", done.distance > 0.5
            except Exception as error:
                text, wrong = f"FAILS  {type(error).__name__}: {str(error)[:100]}", True
                if chosen.trace:
                    traceback.print_exc()
            faults += wrong
            print(f"{text} | {estimator}: {case}", flush=True)
    print(f"{faults} differ or fail")
    return min(faults, 99)


if __name__ == "__main__":
    sys.exit(main())

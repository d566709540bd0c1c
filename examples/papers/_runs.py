"""What scripts of this folder share: data, a process a fit, and a row a fit in a CSV file."""

import csv
import multiprocessing
import resource
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


class Results:
    """A CSV file of one row a fit; fits whose rows are there already are not repeated.

    Parameters
    ----------
    path : Path
    keys : tuple of str
        Columns that tell one fit from another; messages name it by the first two.
    values : tuple of str
        Columns that a fit produces.
    """

    def __init__(self, path: Path, keys: tuple[str, ...], values: tuple[str, ...]) -> None:
        self.path, self.keys, self.values = path, keys, values
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = {self._key(row): row for row in csv.DictReader(file)}

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self.keys)

    def find(self, job: Row) -> dict[str, str] | None:
        """The row of a fit, as text, or None."""
        return self.rows.get(self._key(job))

    def compute(
        self,
        jobs: Iterable[Row],
        run: Callable[..., Row],
        *arguments: Any,
        failure: Callable[[Exception], Row | None] = lambda error: None,
    ) -> int:
        """Run the jobs that are missing, each in a process of its own; return how many failed.

        Parameters
        ----------
        jobs : iterable of dict
            Values of the key columns.
        run : callable
            ``run(job, *arguments)`` returns the other columns. A function of a module.
        *arguments
        failure : callable, optional
            ``failure(error)`` returns the other columns of a fit that need not be repeated though
            it failed, or None.
        """
        failed = 0
        for job in jobs:
            if self.find(job) is not None:
                continue
            print(*(job[name] for name in self.keys[:2]), "...", flush=True)
            try:
                row = {**job, **in_fresh_process(run, job, *arguments)}
            except Exception as error:  # the other fits are worth their rows whatever this one did
                print(f"  failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                known = failure(error)
                if known is None:
                    failed += 1
                    continue
                row = {**job, **known}
            self._append(row)
        return failed

    def _append(self, row: Row) -> None:
        """Add one row, and the header to a new file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.is_file()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*self.keys, *self.values])
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.rows[self._key(row)] = {name: str(value) for name, value in row.items()}


def in_fresh_process(function: Callable[..., Row], *arguments: Any) -> Row:
    """Call in a new interpreter: its peak memory is then its own, and freed at the end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def some_rows(n: int, limit: int | None, seed: int = 0) -> np.ndarray:
    """All of n rows, or `limit` of them drawn at random, in order."""
    if limit is None or limit >= n:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, limit, replace=False))


def data_path(folder: Path, name: str) -> Path:
    """The file of a data set."""
    return folder / f"{name}.npz"


def split_masks(test_mask: np.ndarray) -> np.ndarray:
    """Test rows of every split, (n, splits)."""
    return test_mask.reshape(len(test_mask), -1)


def peak_gigabytes() -> float:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e9 / 1024)  # macOS counts bytes

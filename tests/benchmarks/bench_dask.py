"""One process, four workers, and four of which one is killed: seconds, and equal models.

Run with ``python tests/benchmarks/bench_dask.py``, or with ``--scheduler tcp://127.0.0.1:8786`` on
workers that are there already (``doc/user_guide/large_data.rst``). Rows are drawn on the workers,
from one seed a block: 80 MB at the default of 2e6 rows of four columns, and nowhere all in memory
but in the prediction. The worker is
killed by SIGKILL in the second pass, that of the Gram matrix, when a third of the blocks are done.
"""

import argparse
import logging
import os
import signal
import threading
import time

import dask
import dask.array as da
import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor

pytestmark = pytest.mark.benchmark


def rows(n, n_blocks=32, d=4):
    """X (n, d) and y (n,), drawn block by block where they are asked for."""
    size = n // n_blocks
    X = da.random.default_rng(0).uniform(-2, 2, (n, d), chunks=(size, d))
    noise = da.random.default_rng(1).normal(0, 0.3, n, chunks=size)
    return X, da.sin(2 * X).sum(1) + noise


def model(m):
    kernel = RBF(1.0) + WhiteKernel(0.1)
    return QSGPRegressor(
        kernel, basis="fourier", n_basis=m, solver="cholesky", optimizer=None, random_state=0
    )


def seconds(run):
    start = time.perf_counter()
    found = run()
    return found, time.perf_counter() - start


def kill_one(client, n_done, log):
    """Kill a worker when so many blocks of the next fit are done; returns the thread that does."""
    address, pid = next(iter(client.run(os.getpid).items()))
    before = client.run_on_scheduler(statistics_done)

    def watch():
        while (done := client.run_on_scheduler(statistics_done) - before) < n_done:
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        log(f"{done} sums of blocks were done: SIGKILL to worker {address}, process {pid}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def statistics_done(dask_scheduler=None):
    """Number of statistics of blocks that workers have finished so far."""
    prefix = dask_scheduler.task_prefixes.get("statistic")
    return 0 if prefix is None else prefix.state_counts["memory"]


def fit_and_predict(X, y, m):
    """The model, its mean prediction, and seconds of fit and of prediction."""
    fitted, t_fit = seconds(lambda: model(m).fit(X, y))
    mean, t_predict = seconds(lambda: fitted.predict(X, return_std=True)[0].mean().compute())
    return fitted, mean, t_fit, t_predict


def compare(client, n, m, log=print):
    """Log seconds of fit and predict by one process and by the workers, and largest differences."""
    client.wait_for_workers(4)
    X, y = rows(n)
    some = X[: n // 32].compute()
    with dask.config.set(scheduler="synchronous"):
        alone, expected, t_fit, t_predict = fit_and_predict(X, y, m)
    log(f"one process         fit {t_fit:6.1f} s  predict {t_predict:6.1f} s")
    for kills in (False, True):
        thread = kill_one(client, 42, log) if kills else None
        with client.as_current():
            found, mean, s_fit, s_predict = fit_and_predict(X, y, m)
        if thread is not None:
            thread.join()
        gap = np.abs(found.predict(some) - alone.predict(some)).max()
        log(
            f"{'one of them killed' if kills else 'four workers':18}  fit {s_fit:6.1f} s  "
            f"predict {s_predict:6.1f} s  speed-up {t_fit / s_fit:.2f}, "
            f"{t_predict / s_predict:.2f}; largest difference {gap:.1e}"
        )
        assert gap <= 1e-12 and abs(mean - expected) < 1e-12


def test_bench_workers():
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 4, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**settings) as cluster, distributed.Client(cluster) as client:
        compare(client, 200_000, 256)


if __name__ == "__main__":
    from distributed import Client, LocalCluster

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=2e6)
    parser.add_argument("--basis", type=int, default=1000)
    parser.add_argument("--scheduler")
    asked = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.WARNING)
    where = asked.scheduler or LocalCluster(
        n_workers=4, threads_per_worker=1, dashboard_address=None
    )
    with Client(where) as client:
        compare(client, int(asked.rows), asked.basis)

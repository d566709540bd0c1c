"""Constants of sparse-within-sparse GPs, each with what chose it."""

from typing import Any

# ---- sparse-within-sparse GPs: Algorithm 1 (local/minibatch.py, bound.py; models/swsgp.py)
#: Rates of each kind of coordinate, as multiples of LEARNING_RATE.
LOCAL_RATE_SHARES = {"mean": 10.0, "spread": 10.0, "theta": 1.0, "likelihood": 1.0, "Z": 0.5}
#: Fraction of the steps, the last ones, in which the rate falls.
FALLING = 0.5
#: Steps between two searches for active points, where the kernel or Z moves, and two reports.
REFRESH_EVERY, REPORT_EVERY = 50, 10
#: Of the search for a plateau: steps compared, and nats per observation that count as nothing.
PLATEAU_WINDOW, PLATEAU_GAIN = 100, 2e-3
#: Steps of Algorithm 1 at most, and of a polish.
MOST_ITER, POLISH_ITER = 6000, 400
#: Numbers in the largest array of a tile of rows of the bound.
BOUND_NUMBERS = 2**22

# ---- closed form and natural-gradient steps (models/swsgp.py)
NATURAL_ITER = 14
#: Share of the precisions of the sites that another step would change, beyond which the steps ended
#: short: converged fits are below .02, counts after one step below .1, labels after three at .2, a
#: fit that the precisions of E[exp f] hold about 1 (tests/estimators/test_large_counts.py).
UNSETTLED = 0.5
#: Turns of q and the likelihood's parameters, and steps of L-BFGS in each.
LIKELIHOOD_ROUNDS, LIKELIHOOD_ITER = 3, 20
#: Residuals of the means: small where there is one system to solve or little to each of them, so
#: that the order of rows, or the units of y, do not show in the predictions. Where there is one of
#: many after another, 3e-3 takes half the iterations of 1e-3 and changes the bound by less than the
#: tolerance of the steps (60000 flights, M = 24000: by 1e-4 of it).
SMALL = 5000
TIGHT_CG: dict[str, Any] = {"cg_tol": 1e-8, "cg_max_iter": 1000}
CLOSED_CG: dict[str, Any] = {"cg_tol": 1e-3, "cg_max_iter": 200}
#: The same times the noise, in deviations of the targets: 6000 rows without noise in three columns
#: were missed by .012 at a residual of 1e-3, by .002 at 1e-5.
NOISE_RESIDUAL = 1e-2
STEPS_CG: dict[str, Any] = {"cg_tol": 3e-3, "cg_max_iter": 200}

#: Least noise, where it is learned, of the jitter's variance: values without noise, which f given u
#: is too uncertain to follow, give u errors of its own. Of 4500 of friedman1 and 2, Rosenbrock's
#: and two more functions errors fall to .9 to .4 of what they were, and mean NLPD by .69; with a
#: third of it, or three times it, by .65.
JITTER_NOISE = 0.03

# ---- rows held out (local/prior.py)
#: Rows held out, at least; none below FEW_ROWS.
MIN_HELD_OUT = 500
#: Factors by which the amplitude and the KL weight move, and so many steps either way.
AMPLITUDE_STEP, KL_STEP, MOST_STEPS = 3.0, 0.1, 5
#: Fits of a trial: steps without and with a warm start, tolerance of the bound, and systems.
FIRST_TRIAL_ITER, TRIAL_ITER = 16, 10
TRIAL: dict[str, Any] = {"tol": 1e-3, "cg_max_iter": 15, "cg_tol": 3e-3}
#: Standard errors by which kappa must improve predictions: a rare class has few rows held out.
KL_ERRORS = 2.0

# ---- labels (local/hyperparameters.py)
#: Labels that are left out to compare kernels.
NOISE_ROWS = 2_000
#: Standard deviation of the priors of t and the logs of a, b and d.
LINK_PRIOR_STD = 3.0
#: Noise tried, of the kernel's variance, and where to begin.
NOISE_RATIOS, NOISE_START = (3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0), 0.1
#: Leave-one-out searches of a kernel for labels: the first of each family, and that of the best.
SHORT_SEARCH: dict[str, Any] = {
    "n_neighbors": 20,
    "batch_size": 192,
    "n_steps": 70,
    "learning_rate": 0.3,
}
LONG_SEARCH: dict[str, Any] = {
    "n_neighbors": 32,
    "batch_size": 192,
    "n_steps": 130,
    "learning_rate": 0.2,
}
#: Rows that the evidence of a dense GP knows well enough.
SEARCHED_ROWS = 2_000
#: Noise of standardised labels to begin with.
KRIGED_LABEL_NOISE = 0.1
#: Neighbours of a comparison at most, which takes the cube of it; errors by which to win it.
COMPARED_NEIGHBORS, KRIGED_ERRORS = 32, 2.0

SEARCH: dict[str, Any] = {"subset_size": 700, "n_neighbors": 32, "n_score_rows": 1024}
#: Of the families that are searched by neighbours: neighbours hide what lies between.
FAMILY_STRIDE = 2

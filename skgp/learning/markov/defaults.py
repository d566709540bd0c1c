"""Constants of state-space GPs, each with what chose it."""

# ---- State space (markov/, models/state_space.py)

#: Nats an observation to which the ELBO of a series, or of an additive model, is found.
ELBO_TOL, ADDITIVE_TOL = 1e-8, 1e-6
#: The latter of few observations, of the tolerance of the search: of 60 labels, by default, a
#: quarter fewer steps of the sites than with 1e-6, and .003 nats less.
SITES_TOL = 0.5
#: Tolerance of an ELBO, of that of the search that asks for it.
INNER = 0.1
#: Between inducing locations that are learned, of their span.
LEAST_GAP = 1e-6

#: Error of the evidence, in nats, from which on a state-space form is refined, and tolerances to
#: choose from: RBF of 10 to 16 states. Drawn series of noise 1e-2 to 1e-8 were within .01.
FORM_NATS, FORM_TOLERANCES = 0.003, (1e-8, 1e-9, 2e-11, 1e-12)
#: Nats an observation, by which a probability may exceed 1 in rounding, or an ELBO be wrong: sites
#: of counts at a prior variance of 1e4 have one of 1e127.
LOST_NATS = 1e-3
#: Error of the evidence, in nats, that is worth a warning, and up to which it is one of a figure.
WORTH_A_WARNING, MOST_NATS = 0.01, 10.0

# Seasons and trends of a default kernel, which rows to come decide about: `bench_forecast.py`
#: Times from which on trends compete and periods are looked for, cycles that must be seen, periods
#: and harmonics that are modelled at most.
TREND_LEAST_ROWS, SEASON_LEAST_ROWS = 40, 20
LEAST_CYCLES, MAX_SEASONS, MAX_SEASON_HARMONICS = 2.95, 2, 6
#: Cycles that stiff backgrounds follow by half: waves of 3 to 8 cycles of 60 and 150 times, in
#: noise or beside walks and autoregressions, gain 16 to 52 nats over the better one on average;
#: those of walks alone 8 at most.
STIFF_CYCLES = 3.0, 12.0
#: Cycles of a season that may differ over another, as days do over the week.
MAX_WITHIN = 7
#: Chance that noise shows a period, or that it shows another harmonic of one found; part of the
#: variance that a period must explain. The first is small for what fitting the background adds: of
#: 300 series of 60 times without a season (walks, Matern 3/2, first-order autoregressions) 3 are
#: fitted with one, and 7 with 1e-3.
PEAK_CHANCE, PART_CHANCE, LEAST_EXPLAINED = 1e-4, 1e-3, 0.02
#: Frequencies of a spectrum to a resolution, 1 / span.
OVERSAMPLED = 4
#: Resolutions to either side that the background of a peak is the median of.
NEIGHBOURHOOD = 20
#: Nats that a peak over its neighbourhood must have more than one over a background fitted.
UNMODELLED = 6.9
#: Times, or cells of more, over which waves are fitted, and their entries at once; cells a cycle of
#: the quickest of those in cells.
WAVE_ROWS, WAVE_ENTRIES, CELLS_A_CYCLE = 2000, 2**20, 6
#: Waves from which on a rough gain, with the size of so many an octave, says which are evaluated:
#: those of so many nats, which one in 20 of noise have.
FEW_WAVES, WAVES_AN_OCTAVE, ROUGH_GAIN = 256, 11, 3.0
#: Of the resolution, within which a period is a whole number of others, or of steps.
SNAP_TO_PERIOD, SNAP_TO_STEP = 0.1, 0.05
#: Times up to which seasons and trends compete: a matter of seconds. Drawn series of 40-200 times
#: (smooth and rough processes, noise, walks, lines, kinked lines, trend and season; 80 each), a
#: third ahead: averages over trend and process have an NLPD of 1.21 and intervals of 95% that cover
#: .944, the likelier one alone 1.26 and .933. By kind .13 less to .02 more. A prior of 12 times the
#: variance of the slope, that of short series, loses .01 and follows walks less.
STRUCTURE_ROWS = 20_000
#: The same of counts, outliers and labels, whose searches are of an ELBO: 2000 counts (labels) with
#: a season take 5 (8) s in place of .4 (4).
WORKING_ROWS = 3000
#: Rows a hyper-parameter up to which predictions of a default series average over these, and the
#: weight of a point that counts. Generated series, 40 each, rows between the others and a little
#: ahead: intervals of 95% cover .84 of 10 rows, .87-.89 with one covariate and .91 with three,
#: .90-.91 of 20 rows and .91-.93 of 38.
AVERAGED_ROWS, LEAST_WEIGHT = 5, 1e-3
#: Times from which on, up to those of trends, predictions average over a line beneath the process.
#: Sixteen kinds of generated series, 20 each, a third ahead of 12, 20 and 32 times (of 5 and 8):
#: intervals of 95% cover .60 to 1 in place of .3 to 1 where there is a slope, and the NLPD is .3
#: (.9) less on average and .3 more at worst, of waves of which less than three cycles are seen. A
#: trend that is chosen instead loses .9 there, and an average with a line of as wide a prior as
#: long series have .6.
LINE_LEAST_ROWS = 4
#: Nats to which the evidence with a line and without is found, their share to .0025.
LINE_NATS = 0.01

#: Steps of the level at most, distinct times on either side of one, times at which its precision is
#: evaluated, and standard deviations of its size, of that of the data, and of one left out. Of 240
#: times with a step of 2 to 5 in noise of .3, with or without a season, the step gains 21 to 58
#: nats; walks, kinks, seasons that begin late or grow, outliers and none at all at most 9.
MAX_STEPS, STEP_MARGIN, STEP_KNOTS, STEP_SD, NO_STEP = 3, 5, 32, 3.0, 1e-9
#: Share of the process without a step, a chance that the tenth of the range ahead has one, too.
#: Where steps come by chance, three in 240 times, the NLPD of the tenth ahead is 1.06 without
#: steps, .66 with this share, and 1.38 (.94 with the share) of the normal law of its moments.
STEP_AHEAD = 0.1

#: Minibatches: Adam's rate, at most, and the sum of the rates of all iterations; the least share of
#: a minibatch in the sites; when a smoothed loss no longer falls.
MINIBATCH_RATE, MINIBATCH_REACH = 0.05, 15.0
OLDEST = 0.03
MINIBATCH_PATIENCE, MINIBATCH_SMOOTHING = 100, 0.95

# The choice of a kernel: series drawn from kernels of nu 1/2 to infinity, new rows predicted
#: Rows on which the length scale is found, and on which kernels compete.
SERIES_SCALE_ROWS, CHOICE_ROWS = 2000, 20_000
#: Stretches of consecutive rows that these are in, if not spread evenly.
N_STRETCHES = 10
#: Iterations of a competitor, which ends with gains of so many nats in all, or of few rows with so
#: much an observation; and the tolerance where it starts.
CHOICE_ITER, CHOICE_NATS, CHOICE_TOL, START_TOL = 25, 0.05, 1e-5, 1e-3
#: What is added to Fisher's information of a short series, a standard deviation of 3 in logarithms
#: (and, half-normal, that of log rates of counts);
#: times the last gains that a search may hope for (60 to 300 times: ends within .1 nats). With the
#: same ridge predictions are averaged over points about its end. 27 kinds of generated series of 60
#: to 400 times (walks, slopes that change, growth, seasons, cycles, noise that grows), 3 each, up
#: to 30% ahead: intervals of 95% cover .921 in place of .908 and the NLPD is .03 less; seasons and
#: noise as axes, too, or a standard deviation of 1.5 or 5, change that by less than .005. Priors of
#: the roots of variances (exponential, half-Cauchy) cover as much at best, and some kinds lose .1.
FISHER_RIDGE, OUTLOOK = 0.1, 6.0
#: Times up to which predictions are averaged so, at the price of a state a point.
AROUND_ROWS = 3000
#: Hyper-parameters up to which a search from a kernel given steps by scoring. Of 48 series of 70 to
#: 130 times one process of these ends where L-BFGS does, in .6 to .75 of the seconds (one of 240 by
#: 3 nats below); of sums of two or three 17 of 144 end 7 to 66 nats below, and 2 as much above.
FAR_SCORED = 2
#: Times the gain that a score test promises that a search with a part more may hope for, and length
#: scales that it looks at. Of 634 searches beside trends and seasons (ten kinds of series of 40 to
#: 250 times) 408 are left out by it, none of which would have been chosen, nor with 3.
SCORE_OUTLOOK, N_SCORED = 4.0, 7
#: Nats by which a kernel is worse than another, on whose far side none is then tried.
PAST_NATS = 1.0
#: That a kernel besides the first needs, of a curvature of at most 1: a choice by 60 numbers
#: predicts better than the first kernel, and one by 320 labels does not yet.
ROWS_A_PARAMETER = 25
#: What fewer numbers have to gain, in nats, by a kernel of as many hyper-parameters as the first,
#: and from how many on. Fifteen kinds of generated series, 42 each of 10 to 55 times: NLPD between
#: the others (ahead) 1.6 (1.3) less of smooth functions without noise, .003 (.002) more of noisy
#: ones; with 2 nats .005 more, with none and from 10 times on .05 (.04).
FEW_NATS, FEWEST_ROWS = 4.0, 10
#: Of a short gap: below, the rows look like white noise whatever the scale.
LEAST_SCALE = 0.1
#: Multiples of the length scale that a start tries.
SCALES = tuple(10.0**power for power in (0.75, 0.0, -0.75, -1.5, -2.25, -3.0))

# Additive models
#: Rows up to which exact inference in their own space is thought of: the time of an iteration in
#: bins, with columns of numbers.
FEW_ADDITIVE_ROWS = 3000
#: Of the prior of hyper-parameters of a default model: standard deviations of the logs of length
#: scales, of the noise and of what columns have in common, and the noise that a search begins with,
#: beside the median, of more rows than `FEW_ADDITIVE_ROWS`.
PRIOR_LOG_SD, NOISE_LOG_SD, COMMON_LOG_SD, PRIOR_START_NOISE = 0.5, 1.0, 3.0, 0.1
#: Where a search of common hyper-parameters may begin besides, of lines: logs of the factors of
#: variances and length scales.
LONG_START = 3.0, 2.0
#: Nats that hyper-parameters of its own have to gain for a column that has a share of the variance
#: or more, beside the log of their choice. 10 kinds of generated functions of 10 to 100 columns and
#: training parts of 19 data sets, 60 rows, numbers (46 fits) and labels (55): mean NLPD 1.023 and
#: .455, with 1 or 2 nats 1.029 and .462, 1.023 and .465; of common ones always 1.037 and .467, of
#: their own 1.069 and .560; with a nat for every column numbers have 1.074.
COLUMN_NATS, LEAST_SHARE = 1.5, 0.01
#: Rows on which interactions that an additive model leaves out are looked for, entries of all pairs
#: of columns together, and the nats per observation of which it warns. Of sums, steps, lines and
#: noise in 3 and 8 columns (96 fits of 60 to 1000 rows) the most is 4.6 nats, .05 an observation of
#: 60 rows; products, sines of sums and sums with a product have 10 nats and more from 200 rows on,
#: .06 to 1.9 an observation. Of labels of some products no component is left to tell by.
INTERACTION_ROWS, INTERACTION_ENTRIES, LEAST_INTERACTION = 300, 3e7, 0.05
#: Of an observation that tells nothing, beside that of the prior: not 0, whose noise is infinite.
LEAST_INFORMATION = 1e-8

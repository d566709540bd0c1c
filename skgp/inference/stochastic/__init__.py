"""The iterations of the paper, whose cost depends neither on n nor on m.

====================================  ============================================================
question                              module
====================================  ============================================================
Phi and S, by columns                 ``basis``
Theorems 1 and 2, Proposition 2       ``estimators``
eq. (3), Proposition 3, appendix F    ``control_variates``
a Gaussian likelihood                 ``sgd``, ``sgd_solver``, ``sgd_state``, ``sgd_hyper``;
                                      ``stochastic`` from a plan to a posterior
Theorem 3                             ``theorem3``, ``likelihood_sgd``, ``likelihood_sgd_state``
samples, steps, rows held out         ``sgd_sampling``, ``sgd_optimizers``, ``sgd_validation``,
                                      ``sgd_prediction``
====================================  ============================================================
"""

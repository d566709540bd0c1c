"""Quadruply stochastic Gaussian processes (Evans and Nair, 2020).

====================================  ============================================================
question                              module
====================================  ============================================================
which basis, solver and covariance    ``plan``, ``classification_plan``
the fit, from plan to posterior       ``regression``, ``results``; ``classification``,
                                      ``classification_sgd``, ``classification_results``
one basis function a row, Phi = K     ``function_space/``
Fourier features, inducing points     ``weight_space/``
with unit prior
stochastic gradients, Theorems 1-3    ``stochastic/``
Newton's method for classes           ``laplace/``
relevance vectors, appendix I.3       ``relevance/``
Laplace noise, appendix H.2           ``robust/``
====================================  ============================================================
"""

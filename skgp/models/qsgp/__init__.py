"""Quadruply stochastic Gaussian processes (Evans and Nair, 2020).

====================================  ============================================================
question                              module
====================================  ============================================================
which basis, solver and covariance    ``plan``
the fit, from plan to posterior       ``regression``, ``results``
one basis function a row, Phi = K     ``function_space``, ``covariances``
Fourier features, inducing points     ``design``, ``streaming_gram``, ``evidence``, ``weights_cg``,
with unit prior                       ``gauss_seidel``, ``pathwise``, ``weights``, ``whitened``
stochastic gradients, Theorems 1, 2   ``stochastic``, ``basis``, ``estimators``,
                                      ``control_variates``, ``sgd`` and its parts ``sgd_*``
====================================  ============================================================
"""

"""Samples of the posterior over hyper-parameters, exact or from stochastic gradients."""

"""Solvers with one basis function a row: dense factors, conjugate gradients, posterior draws."""

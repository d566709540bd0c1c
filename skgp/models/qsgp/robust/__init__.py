"""Regression with Laplace noise."""

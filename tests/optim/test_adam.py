"""Adam against its formulas in NumPy, and what a fit loads of torch."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from skgp.optim import Adam


def reference(x, gradients, lr, betas, eps=1e-8):
    """The steps of Kingma and Ba, algorithm 1."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        x = x - lr * m_hat / (np.sqrt(v_hat) + eps)
    return x


def take_steps(optimizer, leaf, gradients):
    for gradient in gradients:
        leaf.grad = torch.as_tensor(gradient)
        optimizer.step()


@pytest.mark.parametrize("shape", [(3,), (), (2, 70_001)])  # the last goes block by block
def test_adam_takes_the_steps_of_the_paper(rng, shape):
    start, gradients = rng.standard_normal(shape), rng.standard_normal((5, *shape))
    leaf = torch.tensor(start, requires_grad=True)
    take_steps(Adam([leaf], lr=0.03, betas=(0.8, 0.95)), leaf, gradients)
    expected = reference(start, gradients, 0.03, (0.8, 0.95))
    np.testing.assert_allclose(leaf.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_adam_moves_groups_at_their_own_rates_and_only_what_has_a_gradient(rng):
    a, b, c = (torch.zeros(2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    optimizer = Adam([{"params": [a], "share": 2.0}, {"params": [b, c], "lr": 0.5}], lr=0.1)
    assert optimizer.param_groups[0]["share"] == 2.0
    optimizer.param_groups[0]["lr"] = 0.2
    a.grad = b.grad = torch.ones_like(a)
    optimizer.step()
    # The first step is the rate, whatever the gradient.
    for leaf, expected in ((a, -0.2), (b, -0.5), (c, 0.0)):
        torch.testing.assert_close(
            leaf.detach(), torch.full_like(leaf, expected), rtol=1e-7, atol=0
        )
    optimizer.zero_grad()
    assert a.grad is None


def test_adam_goes_on_from_the_moments_of_another(rng):
    start, gradients = rng.standard_normal(4), rng.standard_normal((6, 4))
    leaf = torch.tensor(start, requires_grad=True)
    first = Adam([leaf])
    take_steps(first, leaf, gradients[:3])
    second = Adam([leaf])
    second.load_state_dict(first.state_dict())
    take_steps(second, leaf, gradients[3:])
    expected = reference(start, gradients, 1e-3, (0.9, 0.999))
    np.testing.assert_allclose(leaf.detach().numpy(), expected, rtol=1e-12)
    assert first.state_dict()["n_steps"] == [3]  # and shares nothing with it


FITS = """
import json, os, sys, warnings
import numpy as np, skgp
from sklearn.gaussian_process.kernels import DotProduct, RBF
names = ["torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy"]
X = np.random.default_rng(0).normal(size=(24, 1))
y = np.sin(X[:, 0])
options = {
    "QSGPRegressor": [{}, {"kernel": DotProduct() * RBF()}, {"solver": "sgd", "max_iter": 3}],
    "DLMGPRegressor": [{"n_inducing": 5}, {"n_inducing": 5, "batch_size": 10, "max_iter": 3}],
    "SWSGPRegressor": [{}, {"method": "variational", "batch_size": 10, "max_iter": 3}],
    "SWSGPClassifier": [{}, {"batch_size": 10, "max_iter": 3}],
    "BayesianGPRegressor": [{}, {"kernel": DotProduct() * RBF(), "n_samples": 64}],
}
estimators = [getattr(skgp, name) for name in skgp.__all__ if name[-4:] in ("ssor", "fier")]
before = dict(os.environ), list(warnings.filters)
warnings.simplefilter("ignore")
for estimator in estimators:
    for chosen in options.get(estimator.__name__, [{}]):
        target = y > 0 if hasattr(estimator, "predict_proba") else y
        estimator(**chosen).fit(X, target).predict(X)
warnings.filters.pop(0)
print(json.dumps({
    "n": len(estimators),
    "loaded": [name for name in names if name in sys.modules],
    "environment": dict(os.environ) == before[0],
    "filters": [str(f) for f in warnings.filters if f not in before[1]],
}))
"""


def test_fits_load_no_compiler_and_leave_no_filter():
    command = [sys.executable, "-c", FITS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = {"n": 9, "loaded": [], "environment": True, "filters": []}
    assert json.loads(found.stdout.splitlines()[-1]) == expected

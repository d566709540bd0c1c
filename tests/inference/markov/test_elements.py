"""Elements against dense Gaussian algebra: joining, pushing, pulling, and the tree of them."""

import numpy as np
import pytest
import torch

from skgp.inference.markov.elements import Element, ElementTree, combine, pull, push

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def random_elements(d, n, seed=0):
    """n elements with well-conditioned spreads and weights; A is no contraction in all of them."""
    rng = np.random.default_rng(seed)

    def positive():
        root = rng.normal(size=(n, d, d))
        return torch.tensor(root @ np.swapaxes(root, 1, 2) / d)

    def vector():
        return torch.tensor(rng.normal(size=(n, d)))

    A = torch.tensor(rng.normal(size=(n, d, d)) / d**0.5)
    ll = torch.tensor(rng.normal(size=n))
    return Element.of(A, vector(), positive(), vector(), positive(), ll)


def one(element, i):
    """Element i in NumPy: A, b, P, eta, J, ll."""
    parts = element.A, element.b, element.P, element.eta, element.J, element.ll
    return [np.asarray(t[i]) for t in parts]


def dense_chain(elements, m, C):
    """All states jointly, given all data before and after; and the log density of the data.

    Returns the mean ``(n + 1, d)`` and covariance ``(n + 1, d, n + 1, d)``, and nats.
    """
    n, d = elements.b.shape
    F, mean = np.eye((n + 1) * d), [m]
    noise = np.zeros_like(F)
    J, eta, ll = np.zeros_like(F), np.zeros((n + 1) * d), 0.0
    noise[:d, :d] = C
    for i in range(n):
        A, b, P, e, Ji, li = one(elements, i)
        here, there = slice(i * d, (i + 1) * d), slice((i + 1) * d, (i + 2) * d)
        F[there] += A @ F[here]
        noise[there, there] = P
        mean.append(A @ mean[-1] + b)
        J[here, here] += Ji
        eta[here] += e
        ll += li
    mean, prior = np.concatenate(mean), F @ noise @ F.T
    M = np.eye(len(mean)) + prior @ J
    cov = np.linalg.solve(M, prior)
    posterior = np.linalg.solve(M, mean + prior @ eta)
    ll += 0.5 * (eta @ cov @ eta - np.linalg.slogdet(M)[1])
    ll += eta @ np.linalg.solve(M, mean) - 0.5 * mean @ J @ np.linalg.solve(M, mean)
    return posterior.reshape(n + 1, d), cov.reshape(n + 1, d, n + 1, d), ll


def prior_state(d):
    rng = np.random.default_rng(9)
    root = rng.normal(size=(d, d))
    return rng.normal(size=d), root @ root.T


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_combine_is_associative(d):
    a, b, c = (random_elements(d, 3, seed) for seed in range(3))
    left, right = combine(combine(a, b), c), combine(a, combine(b, c))
    for name in ("A", "b", "P", "eta", "J", "ll"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), **CLOSE)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_tree_agrees_with_the_dense_joint_distribution(d, n):
    elements = random_elements(d, n)
    m, C = prior_state(d)
    mean, cov, ll = dense_chain(elements, m, C)
    tree = ElementTree(elements)
    start = torch.tensor(m), torch.tensor(C)
    *_, total = push(tree.total, start[0][None], start[1][None])
    np.testing.assert_allclose(total[0], ll, rtol=1e-10)
    # Past and future of the state at the start of each element, met.
    m0, P0 = tree.starts(*start)
    eta, J = pull(elements, *tree.futures())
    for i in range(n):
        M = np.eye(d) + np.asarray(P0[i] @ J[i])
        here = np.asarray(m0[i] + P0[i] @ eta[i])
        np.testing.assert_allclose(np.linalg.solve(M, here), mean[i], **CLOSE)
        np.testing.assert_allclose(np.linalg.solve(M, P0[i]), cov[i, :, i], **CLOSE)


@pytest.mark.parametrize("d", [2, 5])
def test_push_is_combining_with_an_element_that_forgets_its_start(d):
    element = random_elements(d, 4)
    m, C = (torch.tensor(t) for t in prior_state(d))
    zero = torch.zeros(4, d, d, dtype=torch.float64)
    prior = Element.of(zero, m.expand(4, -1), C.expand(4, -1, -1), zero[:, 0], zero, zero[:, 0, 0])
    expected = combine(prior, element)
    mean, cov, log_density = push(element, prior.b, prior.P)
    torch.testing.assert_close(mean, expected.b, **CLOSE)
    torch.testing.assert_close(cov, expected.P, **CLOSE)
    torch.testing.assert_close(log_density, expected.ll, **CLOSE)


def test_combine_marks_integrals_that_diverge():
    element = random_elements(2, 1)
    first = element.map(lambda t: t.clone())
    first.P.copy_(torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64)))
    second = element.map(lambda t: t.clone())
    second.J.copy_(torch.diag(torch.tensor([-2.0, 0.0], dtype=torch.float64)))
    assert combine(first, second).ll.isnan().all()

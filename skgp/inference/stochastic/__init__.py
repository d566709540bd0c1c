"""The iterations of QSGP, whose cost depends neither on n nor on m.

============================================  ==================================================
question                                      module
============================================  ==================================================
Phi and S, by columns, and samples of them    ``basis``
Theorems 1 and 2, Proposition 2; eq. (3)      ``estimators``
what is learned and handed on                 ``state``
minibatches, steps, stopping                  ``engine``
a Gaussian likelihood: Theorems 1 and 2       ``gaussian``
any likelihood: Theorem 3                     ``likelihood``
============================================  ==================================================
"""

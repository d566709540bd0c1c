"""
A data frame with missing values and categories
===============================================

Tables have missing numbers and columns of words. In a pipeline they are imputed and encoded inside
every fold, and the Gaussian process that follows gives the price of a house an interval.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.inspection import permutation_importance
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from skgp import QSGPRegressor
from skgp.estimators import log_predictive_density_scorer

# %%
# Houses with an area, an age that is not always known, and a district.
rng = np.random.default_rng(0)
n = 400
houses = pd.DataFrame(
    {
        "area": rng.uniform(40, 200, n),
        "age": np.where(rng.random(n) < 0.15, np.nan, rng.uniform(0, 100, n)),
        "district": rng.choice(["centre", "harbour", "hill"], n),
        "door": rng.integers(1, 100, n),
    }
)
worth = houses["district"].map({"centre": 1.5, "harbour": 1.0, "hill": 1.2})
fading = 1 - 0.4 * np.sin(np.pi * houses["age"].fillna(50) / 100)
price = 2.5 * houses["area"] * worth * fading + rng.normal(0, 25, n)
train, test, y_train, y_test = train_test_split(houses, price, random_state=0)

# %%
# ``set_output`` keeps the names of the columns up to the model.
columns = make_column_transformer(
    (OneHotEncoder(sparse_output=False), make_column_selector(dtype_exclude=np.number)),
    remainder=make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler()),
)
model = make_pipeline(columns, QSGPRegressor(random_state=0)).set_output(transform="pandas")
densities = cross_val_score(model, train, y_train, cv=3, scoring=log_predictive_density_scorer)
model.fit(train, y_train)
low, high = model[-1].predict_interval(model[:-1].transform(test), coverage=0.9)
print("nats per observation, three folds:", densities.round(2))
print("R2:", round(model.score(test, y_test), 3))
print("inside 90% intervals:", np.mean((low <= y_test) & (y_test <= high)).round(3))
print(model[-1].feature_names_in_)

# %%
# What the model uses, by permutation of the columns of the table.
found = permutation_importance(model, test, y_test, n_repeats=5, random_state=0)
order = np.argsort(found.importances_mean)
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
mean = model.predict(test)
axes[0].errorbar(mean, y_test, xerr=[mean - low, high - mean], fmt=".", ms=4, lw=0.5, alpha=0.7)
axes[0].axline((200, 200), slope=1, color="k", lw=1)
axes[0].set(xlabel="predicted price, and 90% interval", ylabel="price")
axes[1].barh(test.columns[order], found.importances_mean[order])
axes[1].set(xlabel="fall of R2 when the column is permuted")
plt.show()

"""transformers' classes that choose a model's own, imported without scikit-learn.

Where that is installed, transformers imports it with SciPy and pandas for one setting of assisted generation (5.5 to
5.19, `generation/candidate_generator.py`), which nothing here uses: 1.1 s in each process that has a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import utils

__all__ = ["AutoConfig", "AutoModelForCausalLM"]


@contextmanager
def _without_scikit_learn() -> Iterator[None]:
    asked = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        yield
    finally:
        utils.is_sklearn_available = asked


with _without_scikit_learn():
    from transformers import AutoConfig, AutoModelForCausalLM

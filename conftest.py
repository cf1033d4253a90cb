"""What every doctest may use without importing it."""

from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, nn=nn)

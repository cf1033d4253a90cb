"""One thread for each test process, and the names that every doctest may use."""

from typing import Any

import pytest
import torch
from torch import nn

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, nn=nn)

"""What the tests of several modules ask or need."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


def refused(
    kind: type[Exception], call: Callable[..., object], *args: object, **options: object
) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Files with these names and contents in a folder, which is made."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder

"""``python -m xncaps``: the same as the ``xncaps`` command."""

from xncaps.cli.main import run

run()

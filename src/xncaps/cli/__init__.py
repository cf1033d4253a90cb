"""The ``xncaps`` command."""

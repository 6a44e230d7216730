"""A command line as somebody types it."""

import pytest

from tltlab.cli.app import main


def typed(capsys, *args):
    """Exit code, standard output and standard error of a command line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0), *capsys.readouterr()

"""What ends a command from outside lets it close what it holds."""

import os
import signal
import time

import pytest

from tltlab.cli import app as cli


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch, capsys):
    closed = []

    def command(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            closed.append(args)

    monkeypatch.setattr(cli, "_run", command)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="130"):
        cli.main(["train"])
    assert closed == [["train"]]
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before

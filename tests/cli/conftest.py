"""How the tests run the command: in this process, with what it printed."""

import pytest

from fisherhash import cli


@pytest.fixture
def run(capsys):
    """Runs the command in this process: exit code, stdout, stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run

"""Claims: one process at a time, and nothing left behind by a killed one."""

import subprocess
import sys

from fisherhash.experiments.claims import Claims

HOLD = (
    "import sys; from pathlib import Path; from fisherhash.experiments.claims import Claims\n"
    "with Claims(Path(sys.argv[1])).claim('a') as ours:\n"
    "    print(ours, flush=True); sys.stdin.read()\n"
)


def test_one_process_at_a_time_and_free_after_a_kill(tmp_path):
    path = tmp_path / "lock"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    claims = Claims(path)
    with claims.claim("a") as ours:
        assert not ours
    with claims.claim("b") as ours:
        assert ours
    other.kill()
    other.communicate()
    with claims.claim("a") as ours:
        assert ours
    claims.close()

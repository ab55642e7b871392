"""The command line: one function per verb, in the modules of this package.

Exit codes: 0, 1 (failed), 2 (bad use), 130 (interrupted), 141 (the reader of a pipe has ended). A
new verb is a function with ``@app.command`` in a module imported below.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import NoReturn

from cyclopts import App, CycloptsError
from cyclopts.exceptions import (
    MissingArgumentError,
    UnknownCommandError,
    UnusedCliTokensError,
)

# Importing a module registers its verbs.
from fisherhash.cli import export, index, models, searching, serve, tools
from fisherhash.cli.base import app, say
from fisherhash.cli.index import index_app
from fisherhash.errors import FisherhashError, not_installed
from fisherhash.system.launched import check_alone, launched_rank
from fisherhash.system.options import unknown_option

__all__ = ["app", "export", "index", "main", "models", "searching", "serve", "tools"]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command ``fisherhash``."""
    library = logging.getLogger("fisherhash")
    library.setLevel(logging.INFO)
    if not any(isinstance(handler, _SayHandler) for handler in library.handlers):
        library.addHandler(_SayHandler())
    # Read when torch is loaded. Threads that spin while they wait made training ten times slower
    # on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Read when numpy is loaded. The threads of OpenBLAS wait 2^20 cycles for work before they
    # sleep; by default it is 2^26, in which they keep all cores busy while nothing is computed.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
    # Imports make many objects and no garbage, and what the process has in memory goes with it: to
    # look for garbage often, and at exit, takes time only.
    gc.set_threshold(max(gc.get_threshold()[0], 20_000), *gc.get_threshold()[1:])
    atexit.register(gc.freeze)
    # Pillow warns about odd files; a file that cannot be read is reported anyway. The variable is
    # for worker processes.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that is not UTF-8 is printed as its original bytes.
        sys.stdout.reconfigure(errors="surrogateescape")
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with _one_voice():
            if words[:1] != ["train"]:
                check_alone(" ".join(("fisherhash", *words[:1])))
            app(words, exit_on_error=False, print_error=False, result_action="return_value")
        # Here, where a closed pipe is no traceback; at exit it would be one.
        sys.stdout.flush()
    except CycloptsError as error:
        _fail(_explain(error, words), 2)
    except FisherhashError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        reason = not_installed(error, f"fisherhash {' '.join(words[:1])}")
        if reason is error:
            raise
        _fail(str(reason), 1)
    except KeyboardInterrupt:
        _fail(_interrupted(words), 130)
    except BrokenPipeError:
        # The reader (head, less) closed the pipe and has what it wanted: end as the signal would.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 1)
    raise SystemExit(0)


@contextlib.contextmanager
def _one_voice() -> Iterator[None]:
    """Of several processes only the first one prints; each reports an error of its own."""
    with contextlib.ExitStack() as silenced:
        if launched_rank()[0]:
            nowhere = silenced.enter_context(open(os.devnull, "w"))
            silenced.enter_context(contextlib.redirect_stdout(nowhere))
            silenced.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def _explain(error: CycloptsError, words: list[str]) -> str:
    """The parser's error; a mistyped flag is reported rather than the one it seems to lack."""
    chain = error.command_chain or ()
    command = " ".join(("fisherhash", *chain))
    if isinstance(error, MissingArgumentError):
        verb = functools.reduce(App.__getitem__, chain, app)
        known = [name for one in verb.assemble_argument_collection() for name in one.names]
        for flag in (word.split("=")[0] for word in words):
            if flag.startswith("--") and flag not in known:
                return str(unknown_option(flag, known))
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        if name in words:
            return f"{name} needs a value; see {command} --help"
        if error.argument.field_info.is_positional:
            name = name.removeprefix("--").upper()
        return f"{name} is missing; see {command} --help"
    if isinstance(error, UnknownCommandError) and not chain and words[:1] and words[0] in index_app:
        return f"unknown command '{words[0]}'. Did you mean: fisherhash index {words[0]}?"
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        return f"unexpected: {unused}; see {command} --help"
    return " ".join(str(error).split())


def _interrupted(words: list[str]) -> str:
    verb = " ".join(words[:2] if words[:1] == ["index"] else words[:1])
    if verb not in ("train", "compare", "reproduce", "index sync", "index add", "index copy"):
        return "interrupted"
    if "--watch" in words:
        return "no longer watching; the index is as of its last sync"
    without = " without --overwrite" if "--overwrite" in words else ""
    return f"interrupted; the same command{without} continues where it stopped"


class _SayHandler(logging.Handler):
    """Prints what the library logs like the messages of a verb."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def _fail(sentence: str, code: int) -> NoReturn:
    say(f"fisherhash: {sentence}")
    raise SystemExit(code)

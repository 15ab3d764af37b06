"""Getting one file over the network, whole or not at all."""

import hashlib
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path

from token_files import InputError

TIMEOUT_SECONDS = 30


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
    except (urllib.error.URLError, TimeoutError, ConnectionError) as e:
        reason = getattr(e, "reason", None) or e
        raise InputError(
            f"can't download {url} ({reason}): fetch it where there is a network and pass it with {option}"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return path

"""Packages of others that tests read results back with, or check files by: an environment of their own in build/optional,
which pip makes once. Where it can't, those tests are skipped.
"""

import subprocess
import sys
import sysconfig

import pytest
from trainer import ROOT

PACKAGES = ROOT / "dev/test/optional.txt"
OPTIONAL = ROOT / "build/optional"


@pytest.fixture(scope="session")
def python():
    """The interpreter of an environment that has the packages, and what this one has."""
    stamp = OPTIONAL / "installed"
    if not stamp.exists() or stamp.read_text() != PACKAGES.read_text():
        pip = [OPTIONAL / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", PACKAGES]
        subprocess.run([sys.executable, "-m", "venv", OPTIONAL], check=True)
        packages = next(OPTIONAL.glob("lib/python*/site-packages"))
        (packages / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"pip can't install {PACKAGES.name}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        stamp.write_text(PACKAGES.read_text())
    return OPTIONAL / "bin/python"

"""Builders of imitated conda environments and venvs, and an imitation of conda itself in a few lines of shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BASE_PYTHON = os.path.realpath(sys.executable)
VERSION = ".".join(map(str, sys.version_info[:3]))
SHORT = ".".join(map(str, sys.version_info[:2]))

# Imitates the effects of `conda activate` that a job can observe.
CONDA_SH = """\
conda() {
    [ "$1" = activate ] || return 2
    export CONDA_PREFIX="$2" CONDA_DEFAULT_ENV="by-conda" CONDA_SHLVL=1 PATH="$2/bin:$PATH"
    for script in "$2"/etc/conda/activate.d/*.sh; do [ -f "$script" ] && . "$script"; done
    return 0
}
"""
# Imitates `conda run [--no-capture-output] -p PREFIX WORD…`.
CONDA_RUN = """\
#!/bin/sh
echo "$0 $*" >> "${0%/*}/called"
[ "$1" = run ] || exit 2
shift
[ "$1" = --no-capture-output ] && shift
[ "$1" = -p ] || exit 2
export CONDA_PREFIX="$2" PATH="$2/bin:$PATH"
shift 2
exec "$@"
"""


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """Write an executable file and return its path. The file appears at this path complete and executable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text)
    aside.chmod(0o755)
    aside.replace(path)
    return path


def conda_prefix(prefix: Path, python: bool = True) -> Path:
    """Create a complete conda environment; return its folder.

    If ``python`` is true, bin/python is a link to an interpreter.
    """
    (prefix / "conda-meta").mkdir(parents=True, exist_ok=True)
    (prefix / "conda-meta" / "history").touch()
    (prefix / "bin").mkdir(exist_ok=True)
    if python and not (prefix / "bin" / "python").exists():
        (prefix / "bin" / "python").symlink_to(BASE_PYTHON)
    return prefix


def venv_prefix(prefix: Path) -> Path:
    """Create a venv of this interpreter, without pip; return the folder of the venv."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(BASE_PYTHON)
    (prefix / "pyvenv.cfg").write_text(f"home = {os.path.dirname(BASE_PYTHON)}\nversion = {VERSION}\n")
    site_packages(prefix).mkdir(parents=True)
    return prefix


def site_packages(prefix: Path) -> Path:
    """Return the folder of a venv's packages."""
    return prefix / "lib" / f"python{SHORT}" / "site-packages"


def activation(prefix: Path, text: str, name: str = "a.sh") -> Path:
    """Write an activation script where a conda package would install it; return the path of the script."""
    path = prefix / "etc" / "conda" / "activate.d" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def conda_sh(root: Path, text: str = CONDA_SH) -> Path:
    """Write conda.sh, which defines the shell function `conda` of an installation; return the path of the file."""
    path = root / "etc" / "profile.d" / "conda.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path

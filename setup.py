"""Extensions only: every .pxd in the package names a module to compile; all else is in pyproject.toml.

A module's source is the .pyx beside its .pxd, or else the .py, which then also runs as it is.
GATEWAY_BUILD=debug keeps bounds checks and symbols; GATEWAY_BUILD=pure compiles nothing. Nothing falls back silently.
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

VARIANT = os.environ.get("GATEWAY_BUILD", "release")
if VARIANT not in ("release", "debug", "pure"):
    raise SystemExit(f"GATEWAY_BUILD is {VARIANT!r}: it may be release, debug or pure")
DEBUG = VARIANT == "debug"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": True,  # on pointers there is none; a negative index of a list means what it says
    "cdivision": True,
    "initializedcheck": DEBUG,
    "annotation_typing": False,  # the .pxd gives the C types; an annotation is for readers and mypy
    "binding": False,
}


def extension(pxd: Path) -> Extension:
    source = next(path for path in (pxd.with_suffix(".pyx"), pxd.with_suffix(".py")) if path.exists())
    flags = ["-O1", "-g"] if DEBUG else ["-O2", "-fno-plt"]
    return Extension(".".join(pxd.with_suffix("").parts), [str(source)], extra_compile_args=flags)


modules = [] if VARIANT == "pure" else [extension(pxd) for pxd in sorted(Path("gateway").rglob("*.pxd"))]
setup(ext_modules=cythonize(modules, build_dir=f"build/{VARIANT}", compiler_directives=DIRECTIVES) if modules else [])

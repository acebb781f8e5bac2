"""Which compilers are installed here: JAX's own for CPUs, the CUDA plugin with NVIDIA's ptxas, libtpu."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from profiles.compiled.records import Platform

EXTRAS: dict[Platform, str] = {"cuda": "cuda-check", "tpu": "tpu-check"}
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_PTXAS_FOLDERS = ("cuda_nvcc/bin", "cu13/bin", "cu12/bin")
_PACKAGES: dict[Platform, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"),
    "tpu": ("libtpu",),
}


@dataclass(frozen=True, slots=True)
class Installed:
    """A compiler that is there.

    Attributes:
        path: folders that its programs need at the head of PATH.
        versions: of the packages that it is made of.
    """

    path: tuple[str, ...]
    versions: Mapping[str, str]


def installed(platform: Platform, path: str) -> Installed | str:
    """The compiler for a platform, or what is missing, in words.

    Args:
        path: the PATH that ptxas is looked for on after the wheels.
    """
    folders: tuple[str, ...] = ()
    if platform == "cuda":
        if not any(_importable(name) for name in _PLUGINS):
            return "JAX's CUDA plugin is not installed"
        ptxas = _ptxas_folder(path)
        if ptxas is None:
            return "NVIDIA's ptxas is not installed"
        folders = (ptxas,)
    elif platform == "tpu" and not _importable("libtpu"):
        return "libtpu is not installed"
    names = ("jax", "jaxlib", *_PACKAGES[platform])
    return Installed(folders, {name: found for name in names if (found := _version(name))})


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _ptxas_folder(path: str) -> str | None:
    nvidia = find_spec("nvidia")
    for base in (nvidia.submodule_search_locations or ()) if nvidia else ():
        for folder in _PTXAS_FOLDERS:
            if (Path(base) / folder / "ptxas").is_file():
                return str(Path(base) / folder)
    found = shutil.which("ptxas", path=path)
    return str(Path(found).parent) if found else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

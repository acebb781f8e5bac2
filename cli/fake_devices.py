"""Which devices JAX will see: CPU devices that share this machine, or no accelerators. Set before it is imported."""

import os
import sys

from costmodel.errors import InputError

_FLAG = "--xla_force_host_platform_device_count"


def request_cpu_devices(count: int, *, only: bool) -> bool:
    """Asks the JAX that will be imported for `count` CPU devices.

    Args:
        count: how many.
        only: hide other platforms, so that the CPU devices are the default ones.

    Returns:
        Whether the request was made; False where XLA_FLAGS already has a count, which is kept.

    Raises:
        InputError: MP161 if JAX is imported already, so that it is too late.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if only:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if _FLAG in flags:
        return False
    if "jax" in sys.modules:
        message = f"{count} CPU devices were asked for after JAX was imported"
        raise InputError("MP161", message, f"set XLA_FLAGS={_FLAG}={count} before this process starts")
    os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()
    return True


def look_for_no_accelerator() -> None:
    """Tells the JAX that will be imported to use the CPU, unless the user says otherwise: for commands that only trace.

    Where the compilers of CUDA devices or TPUs are installed and the devices are not there, JAX would log errors about
    them.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

"""The shipped catalogue of device kinds: datasheets, and what kinds were found to achieve in published measurements."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from costmodel.cluster_checks import require_device_name
from costmodel.device_kind import DeviceKind
from profiles.constants import shipped
from profiles.datasheets import datasheet_kinds


@lru_cache(maxsize=1)
def load_catalogue() -> Mapping[str, DeviceKind]:
    """Every shipped device kind by name, with fitted constants where there are any; read once.

    Raises:
        InputError: MP131 or MP133 for a catalogue file with a mistake; MP134 for a name that stands twice.
    """
    constants = shipped()
    return MappingProxyType({name: constants.of(kind) for name, kind in datasheet_kinds().items()})


def device_kind(name: str) -> DeviceKind:
    """The catalogue's kind called `name`.

    Raises:
        InputError: MP132, with the names that were probably meant: ``H100`` is not silently one of the H100s.
    """
    return require_device_name(name, "device", load_catalogue())


def kind_for_jax_name(jax_name: str) -> DeviceKind | None:
    """The kind whose devices JAX calls `jax_name` (`jax.Device.device_kind`); None if the catalogue has none."""
    for kind in load_catalogue().values():
        if jax_name in kind.jax_names:
            return kind
    return None

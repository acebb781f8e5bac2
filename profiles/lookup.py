"""Figures of a profile at any shape, each with its provenance."""

from costmodel.matmul_table import MatmulTable, Product, matmul_table
from profiles.schema import Profile


def matmul_table_of(profile: Profile) -> MatmulTable:
    """The profile's matrix products, with its fitted rates for what lies outside of them."""
    rates = profile.rates
    bandwidth, launch = rates.memory_bandwidth_bytes_per_s, rates.launch_s
    return matmul_table(
        (Product(one.dtype, *one.shape, one.batch, one.time_s) for one in profile.matmuls),
        {dtype: fit.value for dtype, fit in rates.matmul_flops_per_s.items()},
        bandwidth.value if bandwidth is not None else None,
        launch.value if launch is not None else None,
    )

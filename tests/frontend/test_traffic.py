"""What ops are charged for moving elements, forward and backward (B1 to B4 of `costmodel.traffic`)."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.frontend.pricing import BYTES_PER_S, LAUNCH_S, aval, priced

TABLE = aval(50000, 512)
IDS = aval(8, 128, dtype="int32")
WIDE = aval(4096, 4096)
WHOLE = 4096 * 4096 * 2


def rows(table, ids):
    return table.at[ids].get(mode="clip", wrap_negative_indices=False)


def test_a_gather_reads_the_rows_that_it_takes() -> None:
    moved = 2 * 8 * 128 * 512 * 2  # rows read and written
    assert priced(rows, TABLE, IDS)["gather.0"].cost.forward_s == pytest.approx(moved / BYTES_PER_S)


def test_its_backward_scatters_into_a_table_of_zeros() -> None:
    """B3: the table is written once; the rows' cotangents are read, and added to what is there."""
    moved = 50000 * 512 * 2 + 3 * 8 * 128 * 512 * 2
    assert priced(rows, TABLE, IDS)["gather.0"].cost.backward_s == pytest.approx(moved / BYTES_PER_S)
    assert priced(rows, TABLE, IDS, frozen=(0,))["gather.0"].cost.backward_s == 0.0
    assert priced(rows, aval(64, 8), IDS)["gather.0"].cost.backward_s == LAUNCH_S  # a kernel of its own


def test_a_cast_in_front_of_a_gather_reads_rows_too() -> None:
    """The two fuse: the table is never written in the other type, but its cotangent is."""
    ops = priced(lambda t, i: rows(t.astype(jnp.bfloat16), i), aval(50000, 512, dtype="float32"), IDS)
    cast = ops["convert_element_type.0"].cost
    assert cast.forward_s == pytest.approx(8 * 128 * 512 * 4 / BYTES_PER_S)
    assert cast.backward_s == pytest.approx(50000 * 512 * (2 + 4) / BYTES_PER_S)


def test_a_window_is_read_and_its_cotangent_is_as_large_as_the_whole() -> None:
    part = 64 * 4096 * 2
    cost = priced(lambda x: x[:64], WIDE)["slice.0"].cost
    assert cost.forward_s == pytest.approx(2 * part / BYTES_PER_S)
    assert cost.backward_s == pytest.approx((WHOLE + part) / BYTES_PER_S)
    cost = priced(lambda x, i: lax.dynamic_slice(x, (i, 0), (64, 4096)), WIDE, aval(dtype="int32"))
    assert cost["dynamic_slice.0"].cost.forward_s == pytest.approx(2 * part / BYTES_PER_S, rel=1e-4)


def test_cotangents_of_several_windows_are_summed_at_once() -> None:
    """B4: three windows of one product (queries, keys, values) write its cotangent once together."""
    ops = priced(lambda x: tuple(x[:, 1024 * i : 1024 * (i + 1)] for i in range(4)), WIDE)
    assert sum(p.cost.backward_s for p in ops.values()) == pytest.approx(2 * WHOLE / BYTES_PER_S)


@pytest.mark.parametrize(
    ("name", "fn", "forward", "backward"),
    [
        ("transpose.0", lambda x: x.T, 2, 2),
        ("convert_element_type.0", lambda x: x.astype(jnp.float32), 3, 3),
        ("concatenate.0", lambda x: jnp.concatenate([x, x]), 4, 3),  # one cotangent for both
        ("pad.0", lambda x: jnp.pad(x, ((0, 4096), (0, 0))), 3, 3),
        ("broadcast_in_dim.0", lambda x: jnp.broadcast_to(x, (3, 4096, 4096)), 4, 4),
        ("reshape.0", lambda x: x.reshape(-1), 0, 0),
    ],
)
def test_ops_that_move_elements_move_cotangents(name, fn, forward, backward) -> None:
    """B2, in tensors of 4096 x 4096 x 2 bytes."""
    cost = priced(fn, WIDE)[name].cost
    assert cost.forward_s == pytest.approx(forward * WHOLE / BYTES_PER_S, rel=1e-6)
    if name != "concatenate.0":
        assert cost.backward_s == pytest.approx(backward * WHOLE / BYTES_PER_S, rel=1e-6)
    assert priced(fn, WIDE, frozen=(0,))[name].cost.backward_s == 0.0 or name == "reshape.0"


def test_what_computes_is_charged_as_before() -> None:
    """B1."""
    product = priced(lambda a, b: a @ b, WIDE, WIDE)["dot_general.0"].cost
    assert product.backward_s == pytest.approx(2 * product.forward_s)


def test_a_scatter_replaces_rows_in_place_unless_its_operand_is_read_elsewhere() -> None:
    def inside(x, u, i):
        return (-x).at[i].add(u)

    def outside(x, u, i):
        return x.at[i].add(u)  # the argument is another's: it is copied

    args = (aval(50000, 512, dtype="float32"), aval(128, 512, dtype="float32"), aval(128, dtype="int32"))
    kept, copied = (priced(fn, *args)["scatter-add.0"].cost for fn in (inside, outside))
    rows_bytes = 128 * 512 * 4
    assert kept.forward_s == LAUNCH_S > (3 * rows_bytes + 128 * 4) / BYTES_PER_S
    assert copied.forward_s == pytest.approx((2 * 50000 * 512 * 4 + rows_bytes + 128 * 4) / BYTES_PER_S)
    assert copied.backward_s == LAUNCH_S  # the cotangent is handed on, its rows are read

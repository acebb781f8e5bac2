"""What messages of another schedule take: their own bytes, at the rate of the direction in which they go."""

import msgspec
import pytest

from costmodel.simulate import SendTimes
from planner.plan_problem import problem_of
from planner.planfile.schema import Plan, Transfer
from tests.plans import looped_plan, tiny_plan, with_uneven_transfers


def sends(plan: Plan, schedule: str) -> dict[tuple[int, int], SendTimes]:
    found = problem_of(plan, schedule).sends
    assert found is not None
    return {(source.stage, target.stage): send for (source, target), send in found.items()}


def priced(message: Transfer, by: Transfer, *, turned: bool = False) -> SendTimes:
    (link,) = by.links
    rates = by.bytes / link.activation_s, by.gradient_bytes / link.gradient_s
    ahead, back = reversed(rates) if turned else rates
    return SendTimes(
        activation_s=pytest.approx(message.bytes / ahead, rel=1e-12),
        gradient_s=pytest.approx(message.gradient_bytes / back, rel=1e-12),
        latency_s=link.latency_s,
    )


@pytest.mark.parametrize(("schedule", "border"), [("zb-v", (2, 3)), ("interleaved", (1, 2))])
def test_an_activation_that_goes_where_gradients_went_takes_their_rate(schedule, border):
    """By hand: 1 ms ahead and 5 ms back, once with equal bytes and once with twice as many ahead."""
    plan = tiny_plan(stages=2)
    for size, gradient_size, activation_s, gradient_s in ((4, 4, 5e-3, 1e-3), (4, 2, 10e-3, 0.5e-3)):
        (transfer,) = with_uneven_transfers(plan).transfers
        own = msgspec.structs.replace(transfer, bytes=size << 20, gradient_bytes=gradient_size << 20)
        found = sends(msgspec.structs.replace(plan, transfers=(own,)), schedule)
        assert found[0, 1].activation_s == 1e-3 and found[0, 1].gradient_s == 5e-3
        assert found[border].activation_s == pytest.approx(activation_s, rel=1e-12)
        assert found[border].gradient_s == pytest.approx(gradient_s, rel=1e-12)
        assert found[border].latency_s == own.links[0].latency_s


def test_a_direction_that_nothing_went_has_the_rate_of_the_other():
    (transfer,) = with_uneven_transfers(tiny_plan(stages=2)).transfers
    (link,) = transfer.links
    links = (msgspec.structs.replace(link, gradient_s=0.0),)
    own = msgspec.structs.replace(transfer, gradient_bytes=0, links=links)
    found = sends(msgspec.structs.replace(tiny_plan(stages=2), transfers=(own,)), "zb-v")
    assert found[2, 3].activation_s == link.activation_s and found[2, 3].gradient_s == 0.0


def test_stages_on_other_devices_take_their_own_bytes_along():
    """Interleaved on two sets of devices goes 0 1 0 1, zb-v 0 1 1 0: border 2 turns round."""
    plan = with_uneven_transfers(looped_plan("interleaved", homes=2, microbatches=8))
    found, by = sends(plan, "zb-v"), plan.transfers
    assert found.keys() == {(0, 1), (2, 3)}
    assert found[0, 1] == priced(by[0], by[0])
    ways = [priced(by[2], by[0], turned=True), priced(by[2], by[1]), priced(by[2], by[2], turned=True)]
    slowest = max(ways, key=lambda send: send.activation_s.expected + send.gradient_s.expected + send.latency_s)
    assert found[2, 3] == slowest
    assert all(send != slowest for send in ways if send is not slowest)


def test_devices_that_the_plan_sends_nothing_between_have_its_slowest_transfer():
    """zb-v on three sets of devices goes 0 1 2 2 1 0, interleaved 0 1 2 0 1 2: border 2 leads from the last to the
    first."""
    plan = with_uneven_transfers(looped_plan("zb-v", homes=3, microbatches=6))
    homes = problem_of(plan).schedule.homes
    found, by = sends(plan, "interleaved"), plan.transfers
    assert [homes[s] for s in range(6)] == [0, 1, 2, 2, 1, 0]
    ways = [priced(by[2], known) for known in by]
    slowest = max(ways, key=lambda send: send.activation_s.expected + send.gradient_s.expected + send.latency_s)
    assert found[2, 3] == slowest and slowest != priced(by[2], by[2])


def test_a_joined_schedule_sends_the_largest_message_between_its_devices():
    plan = with_uneven_transfers(looped_plan("zb-v", homes=2, microbatches=8))
    found, by = sends(plan, "1f1b"), plan.transfers
    ways = [priced(by[0], by[0]), priced(by[2], by[2], turned=True)]
    assert found == {(0, 1): max(ways, key=lambda s: s.activation_s.expected + s.gradient_s.expected + s.latency_s)}

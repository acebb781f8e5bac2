"""Op times out of compiled text: XLA's light-speed model on GPUs, cycles on TPUs."""

import pytest

from profiles.compiled.op_estimates import op_estimates

LIGHT = (
    'backend_config={"reification_cost":[{"end_to_end_cycles":9.0,"exec_time_us":7.5,"compute_time_us":1,'
    '"memory_access_time_us":2,"name":""},{"end_to_end_cycles":0,"exec_time_us":2.5,"compute_time_us":0,'
    '"memory_access_time_us":0,"name":"sol"}]}'
)
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"3000"}}'


def module(cost: str) -> str:
    return f"""HloModule jit_step

%fused.1 (p.1: f32[8]) -> f32[8] {{
  ROOT %inner.1 = f32[8] multiply(%p.1, %p.1), {cost}
}}
%body.1 (p.2: f32[8]) -> f32[8] {{
  ROOT %fusion.1 = f32[8] fusion(%p.2), kind=kLoop, calls=%fused.1, metadata={{op_name="jit(f)/while/body/mul"}}, {cost}
}}
%cond.1 (p.3: f32[8]) -> pred[] {{
  ROOT %lt.1 = pred[] constant(true)
}}
ENTRY %main.1 (p.4: f32[8]) -> f32[8] {{
  %dot.1 = f32[8] dot(%p.4, %p.4), {cost}
  %none.1 = f32[8] add(%dot.1, %dot.1)
  ROOT %while.1 = f32[8] while(%none.1), condition=%cond.1, body=%body.1, {{"known_trip_count":{{"n":"6"}}}}
}}
"""


@pytest.mark.parametrize(("cost", "clock_hz", "time_s"), [(LIGHT, None, 2.5e-6), (CYCLES, 1.5e9, 2e-6)])
def test_instructions_count_as_often_as_their_loop_runs(cost: str, clock_hz: float | None, time_s: float) -> None:
    found = {op.name: op for op in op_estimates(module(cost), clock_hz)}
    assert set(found) == {"dot.1", "fusion.1"}  # what a fusion is made of is part of it; an add has no estimate
    assert (found["dot.1"].runs, found["fusion.1"].runs) == (1, 6)
    assert all(op.time_s == pytest.approx(time_s) for op in found.values())
    assert found["fusion.1"].op_name == "jit(f)/while/body/mul" and found["dot.1"].op_name == ""


def test_cycles_of_an_unknown_clock_are_no_time() -> None:
    assert op_estimates(module(CYCLES), None) == ()

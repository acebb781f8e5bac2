"""Op times out of compiled HLO text: XLA's speed-of-light model on GPUs, the scheduler's cycles on TPUs.

Both are a compiler's estimate. Instructions count as often as the loops around them run; those inside of a fusion are
part of it. Where an instruction has several estimates, the one named ``sol`` is the bound that does not depend on the
kernel which is chosen on the device.
"""

import math
import re

from profiles.compiled.hlo import computations_of, loops_of
from profiles.compiled.records import OpEstimate

_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_LIGHT = re.compile(
    r'"exec_time_us":([\d.e+-]+),"compute_time_us":[\d.e+-]+,"memory_access_time_us":[\d.e+-]+,"name":"sol"'
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def op_estimates(text: str, clock_hz: float | None) -> tuple[OpEstimate, ...]:
    """Every instruction that has an estimate, in order of the text.

    Args:
        text: of a compiled program; clock_hz: of the device whose cycles it has (TPU).
    """
    computations, entry = computations_of(text)
    loops = loops_of(computations, entry, fusions=False)
    found = []
    for name, computation in computations.items():
        runs = sum(math.prod(n or 1 for n in around) for around in loops.get(name, ()))
        for line in computation.lines if runs else ():
            time_s = _time_s(line, clock_hz)
            match = _NAME.match(line)
            if time_s is not None and match is not None:
                op_name = _OP_NAME.search(line)
                found.append(OpEstimate(name=match[1], op_name=op_name[1] if op_name else "", time_s=time_s, runs=runs))
    return tuple(found)


def _time_s(line: str, clock_hz: float | None) -> float | None:
    if match := _LIGHT.search(line):
        return float(match[1]) * 1e-6
    if clock_hz is not None and (match := _CYCLES.search(line)):
        return int(match[1]) / clock_hz
    return None

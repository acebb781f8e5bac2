"""What a compiler says of one program, and why it said nothing. All bytes are of one device."""

from typing import Literal

import msgspec

from costmodel.provenance import Provenance
from profiles.compiled.hlo import HloCollective

Platform = Literal["cuda", "tpu", "cpu"]
Reason = Literal["missing", "crashed", "timeout", "memory", "refused"]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """XLA's buffer assignment.

    Attributes:
        alias_bytes: results that are written over arguments.
        temporary_bytes: asked for as one block, so that fragmentation inside it counts.
        peak_bytes: the most that is alive at the same time, arguments included; None where the compiler does not say.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """What the program takes while it runs: arguments, temporaries, and results that are no arguments."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.alias_bytes


class OpEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The compiler's own estimate of one instruction, which nobody measured.

    Attributes:
        name: of the HLO instruction; op_name: JAX's path of the operation that it came from.
        time_s: of one run; runs: in one run of the program.
    """

    name: str
    op_name: str
    time_s: float
    runs: int


class CompiledProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What the compiler for `kind` made of a program.

    Attributes:
        kind: device kind that it was compiled for: that of the plan, or ``cpu`` where its compiler is not installed.
        platform: whose compiler it was.
        memory: None where its figures cannot be trusted (all are zero).
        collectives: None where the compiler's text cannot be read; `notes` says why.
        ops: None where the compiler gives no times.
        compile_s: wall time of the compilation.
        versions: of what it was compiled with.
    """

    kind: str
    platform: Platform
    devices: int
    memory: Memory | None
    collectives: tuple[HloCollective, ...] | None
    ops: tuple[OpEstimate, ...] | None = None
    compile_s: float = 0.0
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    provenance: Provenance = "compiled"


class CompileFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there are no figures of a program.

    Attributes:
        reason: ``missing``: no compiler for the kind is installed. ``crashed``: its process died. ``timeout`` and
            ``memory``: it was stopped at a limit. ``refused``: the compiler reported an error.
    """

    kind: str
    reason: Reason
    message: str
    hint: str = ""

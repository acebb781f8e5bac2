"""Exit codes of every command."""

OK = 0
FINDINGS = 1
USAGE = 2  # or bad input: a file, an option, a training function
INFEASIBLE = 3
PROFILE = 4
MISMATCH = 5  # a plan and the hardware, or what was compiled, do not belong together
INTERNAL = 70  # a defect of meshplan
INTERRUPTED = 130

MEANINGS = {
    OK: "ok",
    FINDINGS: "findings",
    USAGE: "usage or bad input",
    INFEASIBLE: "no plan fits",
    PROFILE: "profile missing or stale",
    MISMATCH: "plan and hardware do not match",
    INTERNAL: "defect of meshplan",
    INTERRUPTED: "interrupted",
}

"""One root for every error that a user can cause: a stable code, what is wrong with numbers, and what to do."""


class PlanError(Exception):
    """Something the user can act on.

    Args:
        code: stable identifier such as ``MP101``; `docs/errors.md` lists them all.
        message: what is wrong (got vs limit, with numbers) and where.
        hint: what to do about it.
    """

    exit_code = 2

    def __init__(self, code: str, message: str, hint: str = ""):
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f"\nhint: {self.hint}" if self.hint else "")


class InputError(PlanError, ValueError):
    """MP1xx: a file, argument or training function that cannot be used as it is."""


class InfeasibleError(PlanError):
    """MP2xx: no plan in the search space fits; the message says by how much, where, and what would fit."""

    exit_code = 3


class ProfileError(PlanError, ValueError):
    """MP3xx: a profile is missing, stale, or of another kind."""

    exit_code = 4


class MismatchError(PlanError):
    """MP4xx: a plan and the hardware or model at hand do not belong together."""

    exit_code = 5


class LoweringError(PlanError):
    """MP5xx: what was compiled is not what was planned. Always a defect worth reporting."""

    exit_code = 5

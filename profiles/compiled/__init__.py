"""The compiler as oracle: memory, collectives and op times of programs compiled for devices that are not attached."""

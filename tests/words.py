"""Every schedule of a stage, for brute force."""

from costmodel.schedule.straight import B, F, W, peak_memory


def every_word(m, cap, delta):
    """All words of m microbatches within a cap."""
    found = []

    def grow(word, f, b, w):
        if len(word) == 3 * m:
            found.append(word)
            return
        for kind, can in ((F, f < m), (B, b < f), (W, w < b)):
            if can:
                grow(word + bytes((kind,)), f + (kind == F), b + (kind == B), w + (kind == W))

    grow(b"", 0, 0, 0)
    return [word for word in found if peak_memory(word, delta) <= cap + 1e-9]

"""A pass: computations of layers, and the work of the executor between them."""

from svg import FILLS, GREY, INK, LINES, Picture

STEPS = [
    ("conv", "window", "halo exchange", 0),
    ("batch norm", "reduction", "allreduce of moments", 1),
    ("activation", "none", "nothing", 2),
    ("FC", "reduction", "allreduce of products", 1),
]
LEFT, WIDE, HIGH, STEP = 60, 130, 44, 172


def draw() -> Picture:
    picture = Picture(790, 330, "Communication in a pass")
    under = "Layers only compute; the executor performs all communication of a pass, as declared by the layers."
    picture.heading(30, "Steps of a pass, forward and backward", under)
    for at, (name, kind, crossing, colour) in enumerate(STEPS):
        x = LEFT + at * STEP
        picture.rect(x, 120, WIDE, HIGH, FILLS[colour], LINES[colour], 1.5, round=6)
        picture.text(x + WIDE / 2, 147, name, 15, INK, "middle", bold=True)
        picture.text(x + WIDE / 2, 88, kind, 13, LINES[colour], "middle", bold=True)
        picture.text(x + WIDE / 2, 106, crossing, 11, GREY, "middle")
        picture.rect(x, 206, WIDE, HIGH, "none", LINES[colour], 1.5, dash="4 3", round=6)
        picture.text(x + WIDE / 2, 233, "ctx", 14, INK, "middle")
        picture.line(x + WIDE / 2, 166, x + WIDE / 2, 203, LINES[colour], 1.3, arrow=True)
        if at:
            picture.line(x - STEP + WIDE + 4, 136, x - 4, 136, INK, 1.5, arrow=True)
            picture.line(x - 4, 152, x - STEP + WIDE + 4, 152, INK, 1.5, arrow=True)
    picture.text(LEFT - 8, 140, "x", 14, INK, "end")
    picture.text(LEFT + 3 * STEP + WIDE + 10, 140, "y", 14, INK)
    picture.text(LEFT + 3 * STEP + WIDE + 10, 157, "dy", 14, INK)
    picture.note(
        30, 286, "ctx stores arrays for the backward pass; each pass has its own, so passes may be interleaved."
    )
    picture.note(30, 306, "Views and gradients are allocated in an arena; arrays with disjoint lifetimes share memory.")
    return picture

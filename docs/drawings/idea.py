"""The idea in one picture: an image, its tiles with their halos on four ranks, and the results of one process."""

from svg import FILLS, GREY, LINES, Picture

from neondist.geometry import HaloPlan, Partition, Window

SIDE, HALO, TOP = 200, 16, 84
BLOBS = [
    (38, 44, 20),
    (96, 30, 13),
    (157, 52, 26),
    (101, 99, 31),
    (36, 118, 14),
    (60, 170, 22),
    (139, 158, 19),
    (183, 118, 11),
]
"""x, y and radius of cells under a microscope, several of which cross tile borders"""
CAPTIONS = [
    (24, "One image", "too large for one process"),
    (306, "One tile per MPI rank", "with a halo: cells owned by its neighbours"),
    (656, "The results of one process", "up to rounding, on any number of ranks"),
]
PROMISES = ["the same loss", "the same gradients", "the same trained weights"]


def draw() -> Picture:
    partition = Partition((SIDE, SIDE), (2, 2))
    picture = Picture(930, 364, "neondist: an image is partitioned into tiles, one per rank; ranks exchange halos")
    _crop(picture, "image", 24, TOP, (0, 0, SIDE, SIDE))
    for x, title, under in CAPTIONS:
        picture.text(x, 30, title, 16, bold=True)
        picture.text(x, 50, under, 13, GREY)
    for rank, box in enumerate(partition.boxes()):
        _frame(picture, 24, TOP, box, LINES[rank], 1.6)
    picture.line(240, TOP + SIDE / 2, 278, TOP + SIDE / 2, width=2.5, arrow=True)
    for rank in range(4):
        plan = HaloPlan.of(partition, Window(kernel=2 * HALO + 1, padding=HALO), rank)
        x, y = 306 + 46 * (rank % 2), TOP + 46 * (rank // 2)
        own = plan.own
        rows, columns = (
            range(max(0, low), min(SIDE, high)) for low, high in zip(plan.need.lo, plan.need.hi, strict=True)
        )
        _crop(picture, f"view{rank}", x, y, (columns[0], rows[0], len(columns), len(rows)), FILLS[rank])
        for piece in plan.receives:
            (top, left), (height, width) = piece.target.hull.lo, piece.target.shape
            picture.rect(x + left, y + top, width, height, LINES[piece.peer], opacity=0.45)
        _frame(picture, x, y, own, LINES[rank], 3)
        words = x + own.lo[1] + own.shape[1] / 2, y + (own.lo[0] - 8 if rank < 2 else own.hi[0] + 18)
        picture.text(*words, f"rank {rank}", 13, LINES[rank], "middle", bold=True)
    middle = TOP + SIDE / 2
    picture.line(588, middle, 624, middle, width=2.5, arrow=True)
    for at, words in enumerate(PROMISES):
        y = middle - 34 + 38 * at
        picture.line(660, y - 5, 666, y + 1, LINES[2], 3)
        picture.line(666, y + 1, 676, y - 11, LINES[2], 3)
        picture.text(688, y, words, 16)
    return picture


def _crop(picture, name, x, y, box, fill="#f4f4f4") -> None:
    """Draw the cells (left, top, width, height) of the image at their place below (x, y)."""
    left, top, width, height = box
    picture.rect(x + left, y + top, width, height, fill)
    picture.clip(name, x + left, y + top, width, height)
    for column, row, radius in BLOBS:
        picture.disc(x + column, y + row, radius, "#8a6f9e", clip=name)
        picture.disc(x + column, y + row, radius / 2.6, "#4b3560", clip=name)


def _frame(picture, x, y, box, stroke, width) -> None:
    (top, left), (h, w) = box.lo, box.shape
    picture.rect(x + left, y + top, w, h, "none", stroke, width)

"""An image partitioned into uneven tiles, and the view of one of them: own cells, halo by owner, padding."""

from svg import FILLS, GREY, INK, LINES, Picture

from neondist.geometry import HaloPlan, Partition, Window

EXTENT, PARTS, CELL, LEFT, TOP = (10, 16), (2, 3), 26, 46, 92
SHOWN = 1
UNDER = "Tiles may be uneven: 16 columns on 3 ranks are divided into 6 + 5 + 5."


def draw() -> Picture:
    partition = Partition(EXTENT, PARTS)
    window = Window(kernel=5, padding=2)
    plan = HaloPlan.of(partition, window, SHOWN)
    picture = Picture(790, 400, "Six tiles of an image, and the view of rank 1")
    title = "An image of 10 × 16 cells on 2 × 3 ranks; the view of rank 1 for a 5 × 5 window"
    picture.heading(LEFT, title, UNDER)
    for rank, box in enumerate(partition.boxes()):
        _cells(picture, box, FILLS[rank])
    for piece in plan.receives:
        _frame(picture, piece.target.hull, LINES[piece.peer], 2.2, fill=LINES[piece.peer], opacity=0.28)
    for row in range(plan.need.lo[0], 0):
        for col in range(plan.need.lo[1], plan.need.hi[1]):
            x, y = _at((row, col))
            picture.cell(x, y, CELL, hatch=True)
    _frame(picture, plan.need, INK, 3)
    _frame(picture, plan.own, LINES[SHOWN], 3)
    for rank, box in enumerate(partition.boxes()):
        (top, left), (bottom, right) = box.lo, box.hi
        if right <= plan.own.lo[1]:  # place the label beside the view, not across its edge
            right = plan.need.lo[1]
        if left >= plan.own.hi[1]:
            left = plan.need.hi[1]
        x, y = _at(((top + bottom) / 2 + (top > 0), (left + right) / 2))
        picture.text(x, y + 5, f"rank {rank}", 14, LINES[rank], "middle", bold=True)
    _legend(picture, plan)
    return picture


def _legend(picture: Picture, plan: HaloPlan) -> None:
    x, y = LEFT + EXTENT[1] * CELL + 36, TOP + 8
    rows, cols = plan.need.shape
    lines = [
        (FILLS[SHOWN], LINES[SHOWN], f"own: {plan.own.shape[0]} × {plan.own.shape[1]} cells"),
        ("none", INK, f"view: {rows} × {cols} cells"),
        ("url(#hatch)", GREY, "padding, created locally"),
    ]
    for fill, stroke, words in lines:
        picture.rect(x, y - 13, 18, 18, fill, stroke, 2)
        picture.text(x + 28, y + 1, words)
        y += 30
    for piece in plan.receives:
        h, w = piece.target.shape
        picture.rect(x, y - 13, 18, 18, LINES[piece.peer], LINES[piece.peer], 2, opacity=0.28)
        picture.text(x + 28, y + 1, f"halo from rank {piece.peer}: {h} × {w}")
        y += 30
    picture.note(x, y + 6, f"{plan.halo_volume} cells are received from other ranks;")
    picture.note(x, y + 23, "corners are received directly")
    picture.note(x, y + 40, "from diagonal neighbours.")


def _cells(picture: Picture, box, fill) -> None:
    for row in range(box.lo[0], box.hi[0]):
        for col in range(box.lo[1], box.hi[1]):
            x, y = _at((row, col))
            picture.cell(x, y, CELL, fill=fill, stroke="#ffffff")


def _frame(picture: Picture, box, stroke, width, fill="none", opacity=1.0) -> None:
    (x, y), (h, w) = _at(box.lo), box.shape
    picture.rect(x, y, w * CELL, h * CELL, fill, stroke, width, opacity=opacity)


def _at(place) -> tuple[float, float]:
    return LEFT + place[1] * CELL, TOP + (place[0] + 1.2) * CELL

"""A fully connected layer over tiles: each rank multiplies its cells by the corresponding rows of the weights."""

from svg import FILLS, GREY, INK, LINES, Picture

from neondist.geometry import Partition

SIDE, CELL, ROW, TOP = 4, 30, 17, 92
UNDER = "The image is flattened in row-major order, so the rows of the weights for a tile are not contiguous."


def draw() -> Picture:
    partition = Partition((SIDE, SIDE), (2, 2))
    owner = {
        row * SIDE + col: rank
        for rank, box in enumerate(partition.boxes())
        for row in range(box.lo[0], box.hi[0])
        for col in range(box.lo[1], box.hi[1])
    }
    picture = Picture(790, 430, "A fully connected layer over four tiles")
    title = "An image of 4 × 4 cells on 2 × 2 ranks, and a fully connected layer with 3 outputs"
    picture.heading(30, title, UNDER)
    for i, rank in owner.items():
        row, col = divmod(i, SIDE)
        picture.cell(40 + col * CELL, TOP + 70 + row * CELL, CELL, i, FILLS[rank], LINES[rank], 1.2)
    picture.text(40 + 2 * CELL, TOP + 62, "tiles of x", 13, GREY, "middle")
    left, wide = 246, 118
    picture.text(left + wide / 2, TOP - 8, "weights (16, 3)", 13, GREY, "middle")
    for i, rank in owner.items():
        y = TOP + i * ROW
        picture.rect(left, y, wide, ROW, FILLS[rank], LINES[rank], 0.8)
        picture.text(left - 8, y + 12.5, i, 10, LINES[rank], "end", bold=True)
    picture.text(left - 44, TOP + 8 * ROW + 6, "×", 22, INK, "middle")
    x = 440
    for rank in range(4):
        y = TOP + 26 + rank * 62
        picture.line(left + wide + 8, TOP + 8 * ROW, x - 8, y + 13, "#bbbbbb", 1)
        for k in range(3):
            picture.rect(x + 34 * k, y, 34, 26, FILLS[rank], LINES[rank], 1.4)
        picture.text(x + 51, y - 6, f"rank {rank}: its 4 rows", 12, LINES[rank], "middle")
        picture.line(x + 110, y + 13, 614, TOP + 8 * ROW - 2 + 7 * (rank - 1.5), INK, 1.4, arrow=True)
    picture.text(x + 51, TOP - 8, "partial products", 13, GREY, "middle")
    y = TOP + 8 * ROW - 15
    for k in range(3):
        picture.rect(622 + 34 * k, y, 34, 26, PALE_SUM, INK, 1.6)
    picture.text(673, y - 10, "y + bias", 13, INK, "middle", bold=True)
    picture.note(680, y + 52, "allreduce over the tiles;", "middle")
    picture.note(680, y + 69, "replicated on every rank", "middle")
    picture.note(
        30, 412, "The allreduce sums 3 numbers per sample, regardless of the image size; tiles are not exchanged."
    )
    return picture


PALE_SUM = "#f4f4f4"

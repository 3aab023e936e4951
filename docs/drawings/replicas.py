"""Replicas x tiles: ranks that share a sample, and ranks that hold the same tile of other samples."""

from svg import FILLS, INK, LINES, Picture

from neondist.geometry import GridShape, part_range

SIDE, TOP = 210, 104
UNDER = "The ranks of a replica share each of its samples; the batch is divided among the replicas."


def draw() -> Picture:
    shape = GridShape(replicas=2, rows=2, cols=2)
    picture = Picture(790, 440, "Two replicas of two by two tiles")
    title = "8 ranks as 2 replicas × 2 rows × 2 cols; a batch of 6 samples"
    picture.heading(30, title, UNDER)
    lefts = [90, 480]
    for replica, left in enumerate(lefts):
        lo, hi = part_range(6, shape.replicas, replica)
        name = f"replica {replica}: samples {lo} to {hi - 1}"
        picture.text(left + SIDE / 2, TOP - 12, name, 14, INK, "middle", bold=True)
        for behind in range(hi - lo - 1, 0, -1):
            picture.rect(left + 9 * behind, TOP + 9 * behind, SIDE, SIDE, "#fafafa", "#bbbbbb", 1)
        for tile in range(shape.tiles):
            row, col = divmod(tile, shape.cols)
            x, y, half = left + col * SIDE / 2, TOP + row * SIDE / 2, SIDE / 2
            picture.rect(x, y, half, half, FILLS[tile], LINES[tile], 2)
            name = f"rank {replica * shape.tiles + tile}"
            picture.text(x + half / 2, y + half / 2 - 2, name, 14, LINES[tile], "middle", bold=True)
            picture.note(x + half / 2, y + half / 2 + 17, f"row {row}, col {col}", "middle")
        for y in (TOP + 18, TOP + SIDE - 18):
            x = left + SIDE / 2
            _both(picture, x - 20, y, x + 20, y)
        for x in (left + 18, left + SIDE - 18):
            y = TOP + SIDE / 2
            _both(picture, x, y - 20, x, y + 20)
    y = TOP + 28
    _both(picture, lefts[0] + SIDE + 24, y, lefts[1] - 6, y)
    picture.note((lefts[0] + SIDE + lefts[1]) / 2 + 10, y - 8, "same tile", "middle")
    notes = [
        ("grid.tile_comm", "ranks of one replica: halos (also diagonal), sums of FC and global pooling layers"),
        ("grid.replica_comm", "ranks that hold the same tile, one per replica"),
        ("grid.world", "all ranks: gradients, in one allreduce over tiles and replicas; batch norm statistics"),
    ]
    for at, (name, words) in enumerate(notes):
        picture.text(30, TOP + SIDE + 62 + 24 * at, name, 13, INK, bold=True)
        picture.text(178, TOP + SIDE + 62 + 24 * at, words, 13)
    return picture


def _both(picture: Picture, x1, y1, x2, y2) -> None:
    """A double-headed arrow."""
    mx, my = (x1 + x2) / 2, (y1 + y2) / 2
    picture.line(mx, my, x1, y1, INK, 1.4, arrow=True)
    picture.line(mx, my, x2, y2, INK, 1.4, arrow=True)

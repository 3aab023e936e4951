"""Cells that each tile needs if the stride does not divide the tiles."""

from svg import FILLS, GREY, INK, LINES, Picture

from neondist.geometry import HaloPlan, Partition, Window

CELL, LEFT = 50, 132
UNDER = "window.needs(out) = [lo·s − p, (hi − 1)·s − p + k): the output cells determine the input cells."


def draw() -> Picture:
    partition = Partition((10,), (3,))
    window = Window(kernel=3, stride=2, padding=1, ndim=1)
    outputs = Partition(window.output_extent((10,)), (3,))
    plans = [HaloPlan.of(partition, window, rank) for rank in range(3)]
    picture = Picture(790, 420, "Halos of a strided window on uneven tiles")
    title = "Ten cells on three ranks; a window of three cells, stride 2, one cell of padding"
    picture.heading(30, title, UNDER)
    out, inp = 84, 190
    for label, y in (("output", out), ("input", inp)):
        picture.text(30, y + CELL / 2 + 5, label, 13, GREY)
    for rank in range(3):
        for o in range(*_range(outputs.box(rank))):
            middle = _x(2 * o) + CELL / 2
            for i in range(2 * o - 1, 2 * o + 2):
                picture.line(middle, out + CELL, _x(i) + CELL / 2, inp, LINES[rank], 1.3)
            picture.cell(_x(2 * o), out, CELL, f"y{'₀₁₂₃₄'[o]}", FILLS[rank], LINES[rank], 1.5)
    for i in range(-1, 10):
        owner = next((rank for rank in range(3) if i >= 0 and _inside(partition.box(rank), i)), None)
        if owner is None:
            picture.cell(_x(i), inp, CELL, hatch=True)
        else:
            picture.cell(_x(i), inp, CELL, f"x{'₀₁₂₃₄₅₆₇₈₉'[i]}", FILLS[owner], LINES[owner], 1.5)
    for rank, plan in enumerate(plans):
        y = inp + CELL + 24 + 42 * rank
        (lo, hi), (own_lo, own_hi) = _range(plan.need), _range(plan.own)
        picture.text(30, y + 15, f"rank {rank} needs", 13, LINES[rank], bold=True)
        for i in range(lo, hi):
            mine = own_lo <= i < own_hi
            outside = not 0 <= i < 10
            owner = 0 if outside else next(r for r in range(3) if _inside(partition.box(r), i))
            fill, stroke = ("#ffffff", GREY) if outside else (FILLS[owner], LINES[owner])
            picture.rect(_x(i) + 2, y, CELL - 4, 20, fill, stroke, 1.2)
            if outside:
                picture.rect(_x(i) + 2, y, CELL - 4, 20, "url(#hatch)")
            elif not mine:
                picture.text(_x(i) + CELL / 2, y + 14, "halo", 11, INK, "middle")
        words = f"{plan.halo_volume} halo cells" if plan.halo_volume else "no halo"
        picture.text(_x(10) + 12, y + 15, words, 13, GREY)
    picture.note(30, 404, "Exchanging k // 2 cells on each side would send four cells; only two are needed.")
    return picture


def _x(i: float) -> float:
    return LEFT + (i + 1) * CELL


def _range(box) -> tuple[int, int]:
    return box.lo[0], box.hi[0]


def _inside(box, i: int) -> bool:
    return box.lo[0] <= i < box.hi[0]

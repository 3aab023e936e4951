"""A tied autoencoder across a seam: communication in a pretraining step."""

from svg import FILLS, GREY, INK, LINES, Picture

from neondist.geometry import HaloPlan, Partition, Window

CELL, LEFT = 48, 190
ROWS = {"x": 92, "z": 216, "r": 340}


def draw() -> Picture:
    cells, window = Partition((12,), (2,)), Window(kernel=4, stride=2, padding=0, ndim=1)
    units = Partition(window.output_extent((12,)), (2,))
    plans = [HaloPlan.of(cells, window, rank) for rank in range(2)]
    picture = Picture(840, 470, "A tied autoencoder across a seam")
    picture.heading(
        30, "A pretraining step on two ranks", "Filters of four cells, stride 2; each unit has its own filter."
    )
    for name, y, words in (("x", ROWS["x"], "input x"), ("z", ROWS["z"], "z = W x"), ("r", ROWS["r"], "Wᵀ z")):
        picture.text(30, y + CELL / 2 + 5, words, 14, INK, italic=name == "z")
    seam = _x(_range(cells.box(0))[1])
    picture.line(seam, ROWS["x"] - 26, seam, ROWS["r"] + CELL + 30, INK, 1.2, "2 4")
    for rank in range(2):
        (lo, hi) = _range(units.box(rank))
        for o in range(lo, hi):
            middle = _unit(o) + CELL / 2
            for i in range(2 * o, 2 * o + 4):
                far = not _inside(cells.box(rank), i)
                width, stroke = (2.4, LINES[rank]) if far else (1.0, GREY)
                picture.line(_x(i) + CELL / 2, ROWS["x"] + CELL, middle, ROWS["z"], stroke, width, "5 3" if far else "")
                picture.line(middle, ROWS["z"] + CELL, _x(i) + CELL / 2, ROWS["r"], stroke, width, "5 3" if far else "")
    for rank in range(2):
        for i in range(*_range(cells.box(rank))):
            for row in ("x", "r"):
                picture.cell(_x(i), ROWS[row], CELL, f"{row}{_sub(i)}", FILLS[rank], LINES[rank], 1.5)
        for o in range(*_range(units.box(rank))):
            picture.cell(_unit(o), ROWS["z"], CELL, f"z{_sub(o)}", FILLS[rank], LINES[rank], 1.5)
        (lo, hi), (first, last) = _range(cells.box(rank)), _range(units.box(rank))
        picture.text((_x(lo) + _x(hi)) / 2, ROWS["x"] - 12, f"rank {rank}", 13, LINES[rank], "middle", bold=True)
        weights = f"stores the filters of z{_sub(first)} to z{_sub(last - 1)}"
        picture.note((_x(lo) + _x(hi)) / 2, ROWS["r"] + CELL + 20, weights, "middle")
    halo = max(plan.halo_volume for plan in plans)
    picture.note(
        30,
        430,
        f"Dashed lines cross the seam. Above, {halo} cells of x are received as a halo; below, their contributions to Wᵀ z",
    )
    picture.note(30, 448, "are returned and added (the adjoint of the view). Then the halo of Wᵀ z − x is exchanged.")
    return picture


def _x(i: float) -> float:
    return LEFT + i * CELL


def _unit(o: int) -> float:
    return _x(2 * o + 1.5)


def _range(box) -> tuple[int, int]:
    return box.lo[0], box.hi[0]


def _inside(box, i: int) -> bool:
    return box.lo[0] <= i < box.hi[0]


def _sub(i: int) -> str:
    return "".join("₀₁₂₃₄₅₆₇₈₉"[int(d)] for d in str(i))

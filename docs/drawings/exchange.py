"""fprop copies cells into halos of neighbours; bprop sends halo gradients to the owners, which add them."""

from svg import FILLS, GREY, INK, LINES, Picture

CELL, LEFT = 52, 90


def draw() -> Picture:
    picture = Picture(790, 530, "The halo exchange in fprop, and its adjoint in bprop")
    picture.heading(30, "Eight cells on two ranks, a window of three cells, one cell of padding on each side")
    _fprop(picture, 62)
    picture.line(30, 282, 760, 282, "#cccccc")
    _bprop(picture, 306)
    return picture


def _fprop(picture: Picture, top: int) -> None:
    picture.text(30, top, "fprop: get_fprop_view(tile) copies cells into views", 14, bold=True)
    own, view = top + 24, top + 134
    _label(picture, own, "tiles")
    _label(picture, view, "views")
    for i in range(8):
        picture.cell(_own(i), own, CELL, f"x{_sub(i)}", FILLS[i // 4], LINES[i // 4], 1.5)
    for rank in (0, 1):
        for place, i in enumerate(range(4 * rank - 1, 4 * rank + 5)):
            outside, halo = not 0 <= i < 8, 0 <= i < 8 and i // 4 != rank
            fill, stroke = ("#ffffff", GREY) if outside else (FILLS[i // 4], LINES[i // 4])
            x = _view(rank, place)
            picture.cell(x, view, CELL, "0" if outside else f"x{_sub(i)}", fill, stroke, 1.5)
            if halo:
                picture.curve(_own(i) + CELL / 2, own + CELL + 2, x + CELL / 2, view - 4, 0)
        picture.rect(_view(rank, 0) - 3, view - 3, 6 * CELL + 6, CELL + 6, "none", LINES[rank], 2.5)
        picture.text(_view(rank, 3), view + CELL + 22, f"view of rank {rank}", 13, LINES[rank], "middle", bold=True)


def _bprop(picture: Picture, top: int) -> None:
    picture.text(30, top, "bprop: get_bprop_view(dview) adds halo gradients to their owners' cells", 14, bold=True)
    view, own = top + 24, top + 134
    _label(picture, view, "dview")
    _label(picture, own, "dx")
    for rank in (0, 1):
        for place, i in enumerate(range(4 * rank - 1, 4 * rank + 5)):
            outside, halo = not 0 <= i < 8, 0 <= i < 8 and i // 4 != rank
            fill, stroke = ("#ffffff", GREY) if outside else (FILLS[i // 4], LINES[i // 4])
            x, name = _view(rank, place), f"{'ab'[rank]}{_sub(i)}"
            picture.cell(x, view, CELL, "" if outside else name, fill, stroke, 1.5)
            if outside:
                picture.line(x + 14, view + 14, x + CELL - 14, view + CELL - 14, GREY, 1.5)
                picture.line(x + CELL - 14, view + 14, x + 14, view + CELL - 14, GREY, 1.5)
            if halo:
                end = _own(i) + CELL / 2
                picture.curve(x + CELL / 2, view + CELL + 4, end, own - 4, 0)
                picture.text(end + (18 if rank else -18), own - 10, "+", 18, INK, "middle", bold=True)
        picture.rect(_view(rank, 0) - 3, view - 3, 6 * CELL + 6, CELL + 6, "none", LINES[rank], 2.5)
    for i in range(8):
        words = {3: f"a{_sub(3)}+b{_sub(3)}", 4: f"a{_sub(4)}+b{_sub(4)}"}.get(i, f"{'ab'[i // 4]}{_sub(i)}")
        picture.cell(_own(i), own, CELL, words, FILLS[i // 4], LINES[i // 4], 1.5)
    picture.note(_own(4), own + CELL + 22, "The gradient of padding is discarded.", "middle")


def _own(i: int) -> float:
    return LEFT + 90 + i * CELL + (i // 4) * 44


def _view(rank: int, place: int) -> float:
    return LEFT + rank * (6 * CELL + 24) + place * CELL


def _label(picture: Picture, y: int, words: str) -> None:
    picture.text(30, y + CELL / 2 + 5, words, 13, GREY)


def _sub(i: int) -> str:
    return "₀₁₂₃₄₅₆₇"[i] if i >= 0 and i < 8 else ""

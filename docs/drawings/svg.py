"""A small SVG writer: rectangles, lines, arrows and text."""

from __future__ import annotations

from html import escape

INK, GREY, PALE = "#222222", "#777777", "#eeeeee"
# fill and line of each rank: tints that remain distinguishable in print and for colour-blind readers
FILLS = ["#cfe3f5", "#fbe0c4", "#cfeadb", "#f3d3e4", "#fdf2bf", "#ddd6f0"]
LINES = ["#0072b2", "#d55e00", "#009e73", "#b0417f", "#a98600", "#5b4ba0"]
FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"


class Picture:
    """Shapes in the order in which they are drawn; units are pixels, y points down."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def rect(self, x, y, w, h, fill="none", stroke="none", width=1.0, dash="", opacity=1.0, round=0) -> None:
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        extra += f' fill-opacity="{opacity}"' if opacity != 1 else ""
        extra += f' rx="{round}"' if round else ""
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" fill="{fill}" stroke="{stroke}"'
            f' stroke-width="{width}"{extra}/>'
        )

    def line(self, x1, y1, x2, y2, stroke=INK, width=1.0, dash="", arrow=False) -> None:
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        extra += ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" stroke="{stroke}"'
            f' stroke-width="{width}"{extra}/>'
        )

    def curve(self, x1, y1, x2, y2, bend, stroke=INK, width=1.5, arrow=True) -> None:
        """A curve from one point to another, bent up (bend < 0) or down."""
        mid = bend + (y1 + y2) / 2
        extra = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<path d="M {_n(x1)} {_n(y1)} C {_n(x1)} {_n(mid)} {_n(x2)} {_n(mid)} {_n(x2)} {_n(y2)}" fill="none"'
            f' stroke="{stroke}" stroke-width="{width}"{extra}/>'
        )

    def clip(self, name, x, y, w, h) -> None:
        """A named rectangle to which later shapes may be clipped."""
        self.parts.append(
            f'<clipPath id="{name}"><rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"/></clipPath>'
        )

    def disc(self, x, y, radius, fill, clip="") -> None:
        extra = f' clip-path="url(#{clip})"' if clip else ""
        self.parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"{extra}/>')

    def text(self, x, y, words, size=13, fill=INK, anchor="start", bold=False, italic=False) -> None:
        extra = ' font-weight="bold"' if bold else ""
        extra += ' font-style="italic"' if italic else ""
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{extra}>'
            f"{escape(str(words))}</text>"
        )

    def heading(self, x, title, under="") -> None:
        """Title of the picture, and a line of explanation."""
        self.text(x, 30, title, 15, bold=True)
        if under:
            self.text(x, 50, under, 13, GREY)

    def note(self, x, y, words, anchor="start", size=12) -> None:
        """A small grey note."""
        self.text(x, y, words, size, GREY, anchor)

    def cell(self, x, y, size, words="", fill="#ffffff", stroke=GREY, width=1.0, colour=INK, hatch=False) -> None:
        """A square cell with centred text."""
        self.rect(x, y, size, size, fill, stroke, width)
        if hatch:
            self.rect(x, y, size, size, "url(#hatch)")
        self.text(x + size / 2, y + size / 2 + 4.5, words, 12, colour, "middle")

    def __str__(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
            f' height="{self.height}" font-family="{FONT}" role="img">\n<title>{escape(self.title)}</title>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto-start-reverse"><path d="M 0 0.5 L 8 4 L 0 7.5 z" fill="{INK}"/></marker>\n'
            '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<line x1="0" y1="0" x2="0" y2="6" stroke="{GREY}" stroke-width="1.2"/></pattern></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

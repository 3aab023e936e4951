"""Write the drawings of the documentation: python docs/drawings/draw.py [FOLDER]."""

import sys
from pathlib import Path

import autoencoder
import exchange
import fully_connected
import idea
import passes
import replicas
import tiles
import windows

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
for module in (autoencoder, exchange, fully_connected, idea, passes, replicas, tiles, windows):
    (folder / f"{module.__name__}.svg").write_text(str(module.draw()), encoding="utf-8")

"""`neondist init`, `schema` and `report`: a first experiment file, what editors know of such files, a page on a run."""

from __future__ import annotations

import argparse
import json
import math
from glob import escape
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError, OutputError
from ..io.files import write_text
from ..terminal.console import emit, visible
from . import options

_MASKS = ("masks", "labels")


def add(commands: Any) -> None:
    """Say what can be typed."""
    one = commands.add_parser("schema", help="print the JSON Schema of experiment files, for editors")
    one.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module or .py file that registers your own classes",
    )
    one.add_argument(
        "--tags", action="store_true", help="print the tags instead, for the editor setting yaml.customTags"
    )
    one.set_defaults(command=print_schema)

    one = commands.add_parser("init", help="write an experiment for a folder of images")
    one.add_argument(
        "images",
        type=options.path,
        metavar="DIR",
        help="one subfolder per class, or images/ and masks/ with the same file names, or a labels.csv",
    )
    one.add_argument("--to", type=options.path, metavar="FILE.yaml", help="default: the folder's name, here")
    one.set_defaults(command=init)

    one = commands.add_parser("report", help="write report.html for a run, a self-contained page")
    one.add_argument("run", type=options.path, metavar="DIR", help="the folder of the run")
    one.add_argument("--to", type=options.path, metavar="FILE.html", help="default: report.html in the folder")
    one.set_defaults(command=report)


def report(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from ..train.html_report import report as page

    folder = Path(arguments.run)
    target = Path(arguments.to or folder / "report.html")
    write_text(target, page(folder))
    emit(target)
    return 0


def print_schema(arguments: argparse.Namespace) -> int:
    """Print it."""
    import neondist.train  # noqa: F401  registers the classes that a file may name

    from ..config.schema import schema, tags
    from .experiment import import_module

    for module in arguments.modules:
        import_module(module)
    emit(json.dumps(tags() if arguments.tags else schema(), indent=1))
    return 0


def init(arguments: argparse.Namespace) -> int:
    """Look at the folder and write the file."""
    folder = Path(arguments.images)
    target = Path(arguments.to or f"{folder.resolve().name}.yaml")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; name one that contains images")
    if target.exists():
        raise OutputError(f"{target}: exists already; choose another name with --to")
    masks = next((name for name in _MASKS if (folder / name).is_dir() and (folder / "images").is_dir()), None)
    write_text(target, _segmentation(folder, masks) if masks else _classification(folder))
    emit(f"{target}: try `neondist check {target}`, then `neondist run {target}`")
    return 0


def _classification(folder: Path) -> str:
    from ..data.datasets.image_lists import labelled, matching, samples_of

    tables = sorted(folder.glob("*.csv"))
    inside = folder / "images" if (folder / "images").is_dir() else folder
    classes = sorted(one for one in folder.iterdir() if one.is_dir() and _images(one))
    if len(tables) == 1 and _images(inside):
        images, pattern, labels = _images(inside), _pattern(inside), str(tables[0])
    elif len(classes) < 2:
        if within := sorted(one.parent for one in folder.glob("*/*") if one.is_dir() and _images(one)):
            inner = within[0]
            raise DataError(f"{folder}: has no images, but {inner.name}/ has folders of them: neondist init {inner}")
        raise DataError(
            f"{folder}: has {len(classes)} subfolders with images; give a subfolder for each class, or images/ and"
            " masks/, or images and one table labels.csv of FILE,CLASS or FILE,NUMBER"
        )
    else:
        images, pattern, labels = [path for one in classes for path in _images(one)], _pattern(folder, "*"), "folders"
    crop = _crop(images)
    values, count, known = labelled(labels, samples_of(matching("images", pattern), len(crop)), None)
    if values.ndim > 1:
        what, outputs, cost, metrics = "Which numbers belong to an image?", values.shape[1], "!MSE {}", ""
    else:
        outputs = count or 0
        names = f" {', '.join(one.name for one in classes)[:200]}" if labels == "folders" else ""
        if labels != "folders" and not known:
            names = " The table's whole numbers are classes, from 0; write values to be predicted as 250.0"
        what, cost = f"Which of {count} classes is an image of?{names}", "!CrossEntropy {}"
        metrics = "!Accuracy {}, !F1 {}, !ConfusionMatrix {}"
    return _FILE.format(
        what=visible(what, keep=""), crop=crop, images=_quoted(pattern), labels=_quoted(labels),
        layers=_CLASSIFIER.format(outputs),
        cost=cost, metrics=metrics, number="validation_error" if metrics else "validation_loss",
    )  # fmt: skip


def _segmentation(folder: Path, masks: str) -> str:
    import numpy as np

    from ..data.datasets.image_lists import open_mask

    images, drawn = _images(folder / "images"), _images(folder / masks)
    if not images or not drawn:
        raise DataError(f"{folder}: images/ has {len(images)} images, {masks}/ has {len(drawn)}; give both some")
    found, numbers = set[int](), 0
    for path in drawn[:20]:
        with open_mask(str(path)) as source:
            if source.dtype.kind == "f":
                numbers = source.shape[-1]
                break
            found |= set(np.unique(source.read([(0, n) for n in source.shape])).tolist())
    labels = _quoted(_pattern(folder / masks))
    if numbers:
        what = "Which numbers has each cell of an image? The masks hold floats; classes are whole numbers"
        outputs, cost, metrics = numbers, "!MSE {}", ""
    else:
        none = min(found) if min(found) < 0 else 255 if max(found) == 255 > len(found) else None
        ignored = {none} & found
        outputs = max(found - ignored, default=0) + 1
        if outputs < 2:
            raise DataError(f"{folder / masks}: holds {sorted(found)} alone; number the classes 0, 1, and so on")
        what = f"Which class has each cell of an image? The first masks hold 0 to {outputs - 1}"
        cost, metrics = "!DiceCE {}", "!IoU {}, !F1 {}"
        labels += f"\n  classes: {outputs}             # a mask with others ends the run"
        if ignored:
            what += f", and {none} where there is not a class"
            labels, cost = f"{labels}\n  ignore_index: {none}", f"!DiceCE {{ignore_index: {none}}}"
    return _FILE.format(
        what=visible(what, keep=""), crop=_crop(images), images=_quoted(_pattern(folder / "images")), labels=labels,
        layers=_SEGMENTER.format(outputs), cost=cost, metrics=metrics, number="validation_loss",
    )  # fmt: skip


def _images(folder: Path) -> list[Path]:
    from ..formats.table import known

    return sorted(path for path in folder.iterdir() if known(path) and not path.name.startswith("."))


def _pattern(folder: Path, below: str = "") -> str:
    """Return what the images in a folder, or in its subfolders, are called."""
    folders = [one for one in (folder.glob(below) if below else [folder]) if one.is_dir()]
    kinds = {path.suffix for one in folders for path in _images(one)}
    return str(Path(escape(str(folder)), below, f"*{kinds.pop()}" if len(kinds) == 1 else "*.*"))


def _quoted(text: str) -> str:
    """Return a text in quotes for YAML, on one line whatever it has in it."""
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")


def _crop(paths: list[Path]) -> list[int]:
    """Return the extents of crops that lie in all images, and can be halved."""
    from ..formats import open_source

    crop: list[int] = []
    for path in paths:
        with open_source(path) as source:
            extents = [n for n, name in zip(source.shape, source.axes, strict=True) if name in "ZYX"]
        crop = crop or [64 if len(extents) < 3 else 32] * len(extents)
        crop = [min(pair) for pair in zip(crop, extents, strict=False)]
    return [side // 8 * 8 or side for side in crop]


_FILE = """\
# {what}
# Fields and their defaults: the reference of neondist; `neondist schema` lets an editor complete and check them.
!FitExperiment
dataset: !ImageFiles
  images: {images}
  labels: {labels}
  crop: {crop}         # what the network sees at once; larger ones show more of an image
  crops_per_image: 4
  validation: 0.2        # this share of the images is judged, and not trained with
augment: [!Flip {{}}]      # images are as likely mirrored; leave out what would change their meaning
model: !ConvnetDist
  layers:
{layers}
  cost: {cost}
  optimizer: !AdamW
    learning_rate: 0.001
    decay_all: false       # weight decay leaves biases and norms alone
    schedule: !Warmup {{epochs: 1, then: !CosineDecay {{epochs: 29}}}}  # together the epochs below
batch_size: 16
epochs: 30
metrics: [{metrics}]
best: !Best {{number: {number}, patience: 10}}  # keeps checkpoint_best.h5, and ends a run that gets no better
"""
_BLOCK = """\
    - !ConvLayerDist {{out_channels: {0}, kernel_size: 3, padding: 1, bias: false}}
    - !BatchNormLayerDist {{}}
    - !ActivationLayerDist {{activation: !ReLU {{}}}}"""
_CLASSIFIER = "\n    - !MaxPoolingLayerDist {{kernel_size: 2}}\n".join(
    [_BLOCK.format(n).replace("{", "{{").replace("}", "}}") for n in (16, 32, 64)]
    + ["    - !GlobalAvgPoolingLayerDist {{}}\n    - !FCLayerDist {{out_features: {}}}"]
)
_SEGMENTER = "\n".join(
    [_BLOCK.format(n).replace("{", "{{").replace("}", "}}") for n in (16, 16, 32)]
    + ["    - !ConvLayerDist {{out_channels: {}, kernel_size: 1}}"]
)

"""`neondist init`, `schema` and `report`: initial experiment file, JSON Schema for editors, HTML page of a run."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from contextlib import suppress
from glob import escape
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError, OutputError
from ..io.files import write_text
from ..terminal.console import counted, emit, escape_invisible
from . import options

_IMAGE_FOLDERS = "images", "image", "imgs", "img", "imagestr", "jpegimages"
_MASK_FOLDERS = (
    "masks", "mask", "labels", "label", "segmentationclass", "annotations", "annotation", "gt",
    "groundtruth", "labelstr",
)  # fmt: skip
_SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "test", "testing"}
"""Names of folders in lower case."""


def add_parser(commands: Any) -> None:
    """Register the commands."""
    cmd = commands.add_parser("schema", help="print the JSON Schema of experiment files, for editors")
    cmd.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help=options.IMPORT_HELP,
    )
    cmd.add_argument(
        "--tags", action="store_true", help="print the YAML tags instead, for the editor setting yaml.customTags"
    )
    cmd.set_defaults(command=print_schema)

    cmd = commands.add_parser("init", help="write an experiment for a folder of images, volumes or fields")
    cmd.add_argument(
        "images",
        type=options.parse_path,
        metavar="DIR",
        help="folder with one subfolder per class, or with images/ and masks/, or with one subfolder per case, or with"
        " images and a labels.csv, or with a time series in NetCDF or Zarr files",
    )
    cmd.add_argument(
        "--to", type=options.parse_path, metavar="FILE.yaml", help="output file (default: the folder's name with .yaml)"
    )
    cmd.set_defaults(command=write_experiment)

    cmd = commands.add_parser("report", help="write a report of a run, as a self-contained HTML page")
    cmd.add_argument("run", type=options.parse_path, metavar="DIR", help="the folder of the run")
    cmd.add_argument(
        "--to", type=options.parse_path, metavar="FILE.html", help="output file (default: report.html in the folder)"
    )
    cmd.set_defaults(command=write_report)


def write_report(arguments: argparse.Namespace) -> int:
    """Write the page of a run."""
    from ..train.html_report import run_report_html as page

    folder = Path(arguments.run)
    target = Path(arguments.to or folder / "report.html")
    write_text(target, page(folder))
    emit(target)
    return 0


def print_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema."""
    import neondist.train  # noqa: F401  registers the classes that a file may name

    from ..config.schema import experiment_schema, yaml_custom_tags
    from .experiment import import_module

    for module in arguments.modules:
        import_module(module)
    emit(json.dumps(yaml_custom_tags() if arguments.tags else experiment_schema(), indent=1))
    return 0


def write_experiment(arguments: argparse.Namespace) -> int:
    """Inspect the folder and write the experiment file."""
    folder = Path(arguments.images)
    target = Path(arguments.to or f"{folder.resolve().name}.yaml")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; specify one that contains images")
    if target.exists():
        raise OutputError(f"{target}: already exists; choose another name with --to")
    subfolders = {sub.name.lower(): sub for sub in sorted(folder.iterdir()) if sub.is_dir()}
    pairs = [
        (subfolders[images], subfolders[masks])
        for images, masks in product(_IMAGE_FOLDERS, _MASK_FOLDERS)
        if images in subfolders and masks in subfolders
    ]
    if pairs:
        pair = next((pair for pair in pairs if all(map(_list_images, pair))), pairs[0])
        counts = [len(_list_images(sub)) for sub in pair]
        if not all(counts):
            problem = f"has {counted(counts[0], 'image')}, {pair[1]} has {counts[1]}"
            raise DataError(f"{pair[0]}: {problem}; both need images, outside of subfolders")
        text = _segmentation_yaml(*map(_image_pattern, pair))
    elif patterns := _image_and_mask_patterns_of_cases(folder):
        text = _segmentation_yaml(*patterns)
    else:
        text = _classification_yaml(folder)
    write_text(target, text)
    quoted = shlex.quote(str(target))
    emit(f"{target}: try `neondist check {quoted}`, then `neondist run {quoted}`")
    return 0


def _classification_yaml(folder: Path) -> str:
    from ..data.datasets.image_lists import list_images, match_files, read_labels, require_same_format

    tables = sorted(folder.glob("*.csv"))
    image_folder = folder / "images" if (folder / "images").is_dir() else folder
    classes = sorted(sub for sub in folder.iterdir() if sub.is_dir() and _list_images(sub))
    if len(tables) == 1 and _list_images(image_folder):
        images, pattern, labels = _list_images(image_folder), _image_pattern(image_folder), str(tables[0])
    elif len(classes) < 2:
        if nested := sorted(sub.parent for sub in folder.glob("*/*") if sub.is_dir() and _list_images(sub)):
            first = min(nested, key=lambda sub: not sub.name.startswith("train"))
            raise DataError(f"{folder}: has no images, but {first.name}/ has image folders; run neondist init {first}")
        if any(path.suffix.lower() == ".dcm" for path in folder.rglob("*")):
            raise DataError(f"{folder}: has DICOM files; convert each series to NIfTI, for example with dcm2niix")
        if series := sorted(path for path in folder.iterdir() if path.suffix in (".nc", ".nc4", ".zarr")):
            return _forecast_yaml(series)
        raise DataError(
            f"{folder}: has {counted(len(classes), 'subfolder')} with images; give a subfolder for each class, or"
            " images/ and masks/, or images and one table labels.csv of FILE,CLASS or FILE,NUMBER"
        )
    elif all(sub.name.lower() in _SPLIT_FOLDERS for sub in classes):
        raise DataError(
            f"{folder}: {' and '.join(f'{sub.name}/' for sub in classes)} are splits, not classes; give the training"
            " folder a subfolder for each class, or a labels.csv of its images, and run neondist init on it"
        )
    else:
        images, pattern, labels = (
            [path for sub in classes for path in _list_images(sub)], _image_pattern(folder, "*"), "folders",
        )  # fmt: skip
    crop, crops_per_image = _choose_crop_size_and_count(images)
    items = list_images(match_files("images", pattern), len(crop))
    require_same_format(items, tuple(crop), whole_images=False)
    values, count, are_classes = read_labels(labels, items, None)
    if values.ndim > 1:
        task, outputs, cost, metrics = "Regression: numbers per image", values.shape[1], "!MSE {}", ""
    else:
        outputs = count or 0
        names = f": {', '.join(sub.name for sub in classes)[:200]}" if labels == "folders" else ""
        if labels != "folders" and not are_classes:
            names = ". Integers in the table are class numbers, starting at 0; write regression targets as 250.0"
        task, cost = f"Image classification, {counted(outputs, 'class', 'classes')}{names}", "!CrossEntropy {}"
        metrics = "!Accuracy {}, !F1 {}, !ConfusionMatrix {}"
    return _EXPERIMENT_TEMPLATE.format(
        task=escape_invisible(task, keep=""), crop=crop, crops_per_image=crops_per_image,
        images=_quote_yaml(pattern), labels=_quote_yaml(labels), layers=_classifier_yaml(min(crop), outputs),
        cost=cost, metrics=metrics, **_selection_yaml(len(items), "error" if metrics else "loss"),
    )  # fmt: skip


def _forecast_yaml(paths: list[Path]) -> str:
    """Return an experiment for a time series in NetCDF or Zarr files."""
    from ..data.datasets.climate_files import ClimateFiles
    from ..formats import open_source
    from ..io.hdf5.reader import array_names, open_hdf5

    if paths[0].suffix == ".zarr":
        names = sorted(sub.name for sub in paths[0].iterdir() if sub.is_dir())
    else:
        with open_hdf5(paths[0]) as file:
            names = array_names(file, max_arrays=1000)
    fields = []
    for name in names:
        with suppress(DataError), open_source(f"{paths[0]}:{name}") as source:
            fields += [name] if source.axes == "TYXC" else []
    if not fields:
        raise DataError(f"{paths[0]}: has no variable over time, latitude and longitude; give a folder of such files")
    pattern = str(Path(escape(str(paths[0].parent)), f"*{paths[0].suffix}"))
    dataset = ClimateFiles(pattern, fields)
    dataset.check()
    weights = "" if dataset.fields.latitude is None else "weights: cos(lat)"
    return _FORECAST_TEMPLATE.format(
        files=_quote_yaml(pattern), variables=", ".join(map(_quote_yaml, fields)), outputs=len(fields), weights=weights
    )


def _image_and_mask_patterns_of_cases(folder: Path) -> list[str]:
    """Return the patterns of images and masks in one folder per case, case1/case1_t1.nii and case1/case1_seg.nii."""
    cases = [(sub.name, _list_images(sub)) for sub in folder.iterdir() if sub.is_dir()]
    ends_by_case = [{path.name.removeprefix(name) for path in paths} for name, paths in cases if paths]
    ends = sorted(ends_by_case[0]) if ends_by_case and all(ends == ends_by_case[0] for ends in ends_by_case) else []
    masks = [end for end in ends if re.search(r"(^|[_-])(seg|mask|label|gt)", end, re.IGNORECASE)]
    images = [end for end in ends if end not in masks]
    if len(masks) != 1 or not images:
        return []
    if images[1:]:
        emit(
            f"one image of each case is used, *{images[0]}, without {', '.join(images[1:])}; edit `images` for another"
        )
    return [str(Path(escape(str(folder)), "*", f"*{escape(end)}")) for end in (images[0], masks[0])]


def _segmentation_yaml(image_pattern: str, mask_pattern: str) -> str:
    import numpy as np

    from ..data.datasets.image_lists import find_masks, list_images, match_files, open_mask, require_same_format

    image_names, mask_names = match_files("images", image_pattern), match_files("labels", mask_pattern)
    classes, channels = set[int](), 0
    for name in mask_names[:20]:
        with open_mask(name) as source:
            if source.dtype.kind == "f":
                channels = source.shape[-1]
                break
            classes |= set(np.unique(source.read([(0, n) for n in source.shape])).tolist())
    labels = _quote_yaml(mask_pattern)
    if channels:
        task = "Regression: numbers per cell, because the masks contain floats (classes are integers)"
        outputs, cost, metrics = channels, "!MSE {}", ""
    else:
        void = min(classes) if min(classes) < 0 else 255 if max(classes) == 255 > len(classes) else None
        ignored = {void} & classes
        outputs = max(classes - ignored, default=0) + 1
        if outputs < 2:
            values, example = sorted(classes), " (mask // 255)" if classes == {0, 255} else ""
            raise DataError(
                f"{Path(mask_names[0]).parent}: has only the values {values}; number the classes 0, 1, ...{example}"
            )
        task = f"Segmentation: a class per cell; the first masks contain 0 to {outputs - 1}"
        cost, metrics = "!DiceCE {}", "!IoU {}, !F1 {}"
        labels += f"\n  classes: {outputs}             # other values in a mask are an error"
        if ignored:
            task += f", and {void} for unlabelled cells"
            labels, cost = f"{labels}\n  ignore_index: {void}", f"!DiceCE {{ignore_index: {void}}}"
    crop, crops_per_image = _choose_crop_size_and_count([Path(name) for name in image_names])
    items = list_images(image_names, len(crop))
    require_same_format(items, tuple(crop), whole_images=False)
    find_masks(mask_pattern, items, len(crop))
    return _EXPERIMENT_TEMPLATE.format(
        task=escape_invisible(task, keep=""), crop=crop, crops_per_image=crops_per_image,
        images=_quote_yaml(image_pattern), labels=labels,
        layers=_segmenter_yaml(outputs), cost=cost, metrics=metrics, **_selection_yaml(len(items), "loss"),
    )  # fmt: skip


def _selection_yaml(num_images: int, number: str) -> dict[str, str]:
    """Return the fields of the validation split and of the best epoch; a single image is only trained on."""
    name, patience = (f"validation_{number}", ", patience: 10") if num_images > 1 else ("train_loss", "")
    held_out = "0.2        # fraction of the images held out for validation"
    return {
        "validation": held_out if num_images > 1 else "null       # a single image; set 0.2 if there are more",
        "best": f"!Best {{number: {name}{patience}}}  # keeps checkpoint_best.h5{'; early stopping' * bool(patience)}",
    }


def _list_images(folder: Path) -> list[Path]:
    from ..formats.table import has_known_suffix

    return sorted(path for path in folder.iterdir() if has_known_suffix(path) and not path.name.startswith("."))


def _image_pattern(folder: Path, subfolders: str = "") -> str:
    """Return the file pattern of the images in a folder or its subfolders."""
    folders = [sub for sub in (folder.glob(subfolders) if subfolders else [folder]) if sub.is_dir()]
    kinds = {path.suffix for sub in folders for path in _list_images(sub)}
    return str(Path(escape(str(folder)), subfolders, f"*{kinds.pop()}" if len(kinds) == 1 else "*.*"))


def _quote_yaml(text: str) -> str:
    """Return a text quoted for YAML, on one line."""
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")


def _choose_crop_size_and_count(paths: list[Path]) -> tuple[list[int], int]:
    """Return crop extents that fit in all images and can be halved, and the number of crops to draw from each image."""
    from ..formats import open_source

    crop: list[int] = []
    shapes = set[tuple[int, ...]]()
    for path in paths:
        with open_source(path) as source:
            extents = [n for n, name in zip(source.shape, source.axes, strict=True) if name in "ZYX"]
        shapes.add(tuple(extents))
        crop = crop or [64 if len(extents) < 3 else 32] * len(extents)
        crop = [min(pair) for pair in zip(crop, extents, strict=False)]
    crop = [side // 8 * 8 or side for side in crop]
    return crop, 1 if shapes == {tuple(crop)} else 4


_EXPERIMENT_TEMPLATE = """\
# {task}
# neondist's docs/reference.md lists all fields; with `neondist schema`, an editor completes and checks them.
!FitExperiment
dataset: !ImageFiles
  images: {images}
  labels: {labels}
  crop: {crop}         # cells per sample; larger crops give more context
  crops_per_image: {crops_per_image}
  validation: {validation}
augment: [!Flip {{}}]      # remove transforms that change the meaning of an image
model: !ConvnetDist
  layers:
{layers}
  cost: {cost}
  optimizer: !AdamW
    learning_rate: 0.001
    decay_all: false       # no weight decay for biases and norms
    schedule: !Warmup {{epochs: 1, then: !CosineDecay {{epochs: 29}}}}  # add up to `epochs` below
batch_size: 16
epochs: 30
metrics: [{metrics}]
best: {best}
"""
_FORECAST_TEMPLATE = """\
# Forecast of each time from the two before. `neondist predict --steps` computes longer forecasts.
# neondist's docs/climate.md explains the fields; with `neondist schema`, an editor completes and checks them.
!FitExperiment
dataset: !ClimateFiles
  files: {files}
  variables: [{variables}]
  steps: 2               # consecutive times in an image
  lead: 1                # time steps from the last of them to the target
  validation: 0.1
  test: 0.1
model: !ConvnetDist
  layers:                # padding_mode: [replicate, wrap] if the fields span all longitudes
    - !ConvLayerDist {{out_channels: 24, kernel_size: 5, padding: 2, padding_mode: replicate, activation: !ReLU {{}}}}
    - !ConvLayerDist {{out_channels: 24, kernel_size: 5, padding: 2, padding_mode: replicate, activation: !ReLU {{}}}}
    - !ConvLayerDist {{out_channels: {outputs}, kernel_size: 1}}
  cost: !MSE {{{weights}}}
  optimizer: !Adam {{learning_rate: 0.001}}
batch_size: 8
epochs: 20
metrics: [!RMSE {{{weights}}}, !ACC {{{weights}}}]
best: !Best {{number: validation_loss, patience: 5}}  # keeps checkpoint_best.h5; early stopping
"""
_CONV_BLOCK_TEMPLATE = """\
    - !ConvLayerDist {{out_channels: {0}, kernel_size: 3, padding: 1, bias: false}}
    - !BatchNormLayerDist {{}}
    - !ActivationLayerDist {{activation: !ReLU {{}}}}"""
_POOLING_LAYER = "    - !MaxPoolingLayerDist {kernel_size: 2}"


def _classifier_yaml(extent: int, outputs: int) -> str:
    """Return the layers of a classifier; `extent`: cells of the shortest axis, which limit the number of poolings."""
    layers = [_CONV_BLOCK_TEMPLATE.format(channels) for channels in (16, 32, 64)]
    layers = [f"{layer}\n{_POOLING_LAYER}" if extent >> at > 1 else layer for at, layer in enumerate(layers)]
    head = f"    - !GlobalAvgPoolingLayerDist {{}}\n    - !FCLayerDist {{out_features: {outputs}}}"
    return "\n".join([*layers, head])


def _segmenter_yaml(outputs: int) -> str:
    """Return the layers of a network that keeps the extent."""
    layers = [_CONV_BLOCK_TEMPLATE.format(channels) for channels in (16, 16, 32)]
    return "\n".join([*layers, f"    - !ConvLayerDist {{out_channels: {outputs}, kernel_size: 1}}"])

"""`neondist init`: initial experiment file for a folder of images, volumes or fields."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from contextlib import closing, suppress
from glob import escape
from itertools import groupby, product
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError, OutputError, ShapeError
from ..io.files import write_text
from ..terminal.console import counted, emit, escape_invisible
from . import options
from .init_templates import (
    CLASS_METRICS,
    EXPERIMENT_TEMPLATE,
    FORECAST_TEMPLATE,
    SEGMENTATION_METRICS,
    classifier_layers,
    segmenter_layers,
)

_IMAGE_FOLDERS = "images", "image", "imgs", "img", "imagestr", "jpegimages", "leftimg8bit"
_MASK_FOLDERS = (
    "masks", "mask", "labels", "label", "segmentationclass", "annotations", "annotation", "gt",
    "groundtruth", "labelstr", "gtfine", "gtcoarse",
)  # fmt: skip
_SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "test", "testing"}
"""Names of folders in lower case."""
_HDF5_SUFFIXES = ".h5", ".hdf5"
_TABLE_NAMES, _TABLE_IMAGE_FOLDERS = ("labels", "train", "train_labels"), ("images", "train", "train_images")
_MASK_ENDING = re.compile(r"(^|[._-])(seg|mask|label|gt)", re.IGNORECASE)
_CITYSCAPES_ENDINGS = "_labelTrainIds", "_labelIds"
_CROPS_PER_EPOCH = 64
"""total number of crops if the images are few and large"""
_MAX_INSPECTED_CELLS, _INSPECTED_EXTENT = 1 << 26, 2048
"""maximum number of mask cells to read in search of their values, and extent of the boxes that are read"""
_MAX_SPARSE_NUMBER, _MAX_CLASSES = 40, 256
"""values below the first are class numbers even if smaller values are missing; usual maximum number of classes"""


def add_parser(commands: Any) -> None:
    """Register the command."""
    cmd = commands.add_parser("init", help="write an experiment for a folder of images, volumes or fields")
    cmd.add_argument(
        "images",
        type=options.parse_path,
        metavar="DIR",
        help="folder with one subfolder per class, or with images/ and masks/, or with one subfolder per case, or with"
        " images and a labels.csv, or with a time series in NetCDF or Zarr files; or an HDF5 file of images and labels",
    )
    cmd.add_argument(
        "--to", type=options.parse_path, metavar="FILE.yaml", help="output file (default: the folder's name with .yaml)"
    )
    cmd.set_defaults(command=write_experiment)


def write_experiment(arguments: argparse.Namespace) -> int:
    """Inspect the folder and write the experiment file."""
    folder = Path(arguments.images)
    target = Path(arguments.to or f"{folder.resolve().name.removesuffix('.h5').removesuffix('.hdf5')}.yaml")
    is_hdf5 = folder.suffix in _HDF5_SUFFIXES and folder.is_file()
    if not folder.is_dir() and not is_hdf5:
        raise DataError(f"{folder}: no such folder; specify one that contains images")
    if target.exists():
        raise OutputError(f"{target}: already exists; choose another name with --to")
    text = _hdf5_yaml(folder) if is_hdf5 else _folder_yaml(folder)
    write_text(target, text)
    quoted_path = shlex.quote(str(target))
    emit(f"{target}: try `neondist check {quoted_path}`, then `neondist run {quoted_path}`")
    return 0


def _folder_yaml(folder: Path) -> str:
    subfolders = {sub.name.lower(): sub for sub in sorted(folder.iterdir()) if sub.is_dir()}
    pairs = [
        (subfolders[images], subfolders[masks])
        for images, masks in product(_IMAGE_FOLDERS, _MASK_FOLDERS)
        if images in subfolders and masks in subfolders
    ]
    if pairs:
        pair = next((pair for pair in pairs if all(map(_find_images, pair))), pairs[0])
        locations = []
        for sub in pair:
            if (location := _find_images(sub)) is None:
                raise DataError(f"{sub}: has no images, but {pair[0].name}/ and {pair[1].name}/ both need some")
            if others := [other.name for other in sorted(sub.iterdir()) if location[0] not in (sub, other)]:
                others_text = ", ".join(others[:9])
                emit(f"only {location[0]} is used, not {others_text}; to use others, set `validation` or `test`")
            locations.append(location)
        return _segmentation_yaml(*(_image_pattern(*location) for location in locations))
    if patterns := _image_and_mask_patterns_of_cases(folder) or _image_and_mask_patterns_by_name(folder):
        return _segmentation_yaml(*patterns)
    return _classification_yaml(folder)


def _classification_yaml(folder: Path) -> str:
    from ..data.datasets.image_lists import list_images, match_files, read_labels, require_same_format

    tables = sorted(folder.glob("*.csv"))
    tables = [path for path in tables if not tables[1:] or path.stem.lower() in _TABLE_NAMES]
    folders = [sub for sub in sorted(folder.iterdir()) if sub.name.lower() in _TABLE_IMAGE_FOLDERS and sub.is_dir()]
    image_folder = next((sub for sub in folders if _list_images(sub)), folder)
    classes = sorted(sub for sub in folder.iterdir() if sub.is_dir() and _list_images(sub))
    if len(tables) == 1 and _list_images(image_folder):
        images, pattern, labels = _list_images(image_folder), _image_pattern(image_folder), str(tables[0])
    elif len(classes) < 2:
        return _yaml_of_other_files(folder, len(classes))
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
    label_array, num_classes, are_classes = read_labels(labels, items, None)
    if label_array.ndim > 1:
        task, outputs, cost, metrics = "Regression: numbers per image", label_array.shape[1], "!MSE {}", ""
    else:
        outputs = num_classes or 0
        names = f": {', '.join(sub.name for sub in classes)[:200]}" if labels == "folders" else ""
        if labels != "folders" and not are_classes:
            names = ". Integers in the table are class numbers, starting at 0; write regression targets as 250.0"
        task, cost = f"Image classification, {counted(outputs, 'class', 'classes')}{names}", "!CrossEntropy {}"
        metrics = CLASS_METRICS
    return EXPERIMENT_TEMPLATE.format(
        task=escape_invisible(task, keep=""),
        dataset=_image_files_yaml(pattern, _quote_yaml(labels), crop, crops_per_image, len(items)),
        layers=classifier_layers(min(crop), outputs), cost=cost, metrics=metrics,
        best=_best_yaml("validation" if items[1:] else "train", "error" if metrics else "loss"),
    )  # fmt: skip


def _yaml_of_other_files(folder: Path, num_classes: int) -> str:
    """Return the experiment file for a folder of time series or with one HDF5 file; DataError for other folders."""
    if nested := sorted(sub.parent for sub in folder.glob("*/*") if sub.is_dir() and _list_images(sub)):
        first_folder = min(nested, key=lambda sub: not sub.name.startswith("train"))
        validation = next((sub for sub in nested if sub.name.lower().startswith("val") and sub != first_folder), None)
        remedy = (
            f", and set validation: {_quote_yaml(_image_pattern(validation, '*'))} in the file" if validation else ""
        )
        raise DataError(
            f"{folder}: has no images, but {first_folder.name}/ has image folders; run neondist init"
            f" {shlex.quote(str(first_folder))}{remedy}"
        )
    if any(path.suffix.lower() == ".dcm" for path in folder.rglob("*")):
        raise DataError(f"{folder}: has DICOM files; convert each series to NIfTI, for example with dcm2niix")
    if series := sorted(path for path in folder.iterdir() if path.suffix in (".nc", ".nc4", ".zarr")):
        return _forecast_yaml(series)
    if len(files := sorted(path for path in folder.iterdir() if path.suffix in _HDF5_SUFFIXES)) == 1:
        return _hdf5_yaml(files[0])
    if arrays := _find_arrays_to_convert(folder):
        file = shlex.quote(f"{folder.resolve().name}.h5")
        command = f"neondist data convert {' '.join(shlex.quote(str(path)) for path in arrays)} --to {file}"
        raise DataError(f"{folder}: has arrays, not images; run {command} and then neondist init {file}")
    raise DataError(
        f"{folder}: has {counted(num_classes, 'subfolder')} with images; give a subfolder for each class, or"
        " images/ and masks/, or images and one table labels.csv of FILE,CLASS or FILE,NUMBER"
    )


def _find_arrays_to_convert(folder: Path) -> list[Path]:
    """Return an .npz, or images and labels in .npy files, training split first, in the order for `data convert`."""
    archives, arrays = sorted(folder.glob("*.npz")), sorted(folder.glob("*.npy"))
    labels = [path for path in arrays if re.match(r"y($|[^a-z])|.*(label|target)", path.stem, re.IGNORECASE)]
    images = [path for path in arrays if path not in labels]
    if len(images) != len(labels) or len(images) not in (1, 2, 3):
        return archives if len(archives) == 1 else []

    def split_order(path: Path) -> int:
        return next((at for at, split in enumerate(("train", "val", "test")) if split in path.stem.lower()), 0)

    pairs = zip(sorted(images, key=split_order), sorted(labels, key=split_order), strict=True)
    return [path for pair in pairs for path in pair]


def _hdf5_yaml(path: Path) -> str:
    from ..comm import ProcessGrid
    from ..data import HDF5Dataset

    dataset = HDF5Dataset(path)
    dataset.open(ProcessGrid.serial())
    with closing(dataset):
        labels = dataset.train.targets(range(0, len(dataset.train), -(-len(dataset.train) // 20)))
    dataset_yaml, split = f"!HDF5Dataset\n  path: {_quote_yaml(str(path))}", [*dataset.splits][:2][-1]
    are_maps = labels.ndim > 2
    are_classes = labels.dtype.kind in "iub" and labels.ndim in (1, len(dataset.sample_shape))
    outputs = labels.shape[-1] if not are_classes else dataset.classes or int(labels.max()) + 1
    if are_classes and are_maps:
        dataset_yaml += f"\n  classes: {outputs}"
    task = f"{'Segmentation' if are_maps else 'Image classification'}, {counted(outputs, 'class', 'classes')}"
    cost, metrics = ("!DiceCE {}", SEGMENTATION_METRICS) if are_maps else ("!CrossEntropy {}", CLASS_METRICS)
    if not are_classes:
        task, cost, metrics = f"Regression: numbers per {'cell' if are_maps else 'image'}", "!MSE {}", ""
    return EXPERIMENT_TEMPLATE.format(
        task=task, dataset=dataset_yaml, cost=cost, metrics=metrics,
        layers=segmenter_layers(outputs) if are_maps else classifier_layers(min(dataset.sample_shape[:-1]), outputs),
        best=_best_yaml(split, "error" if are_classes and not are_maps else "loss"),
    )  # fmt: skip


def _forecast_yaml(paths: list[Path]) -> str:
    from ..data.datasets.climate_files import ClimateFiles
    from ..formats import open_source
    from ..io.hdf5.reader import array_names, open_hdf5

    if paths[0].suffix == ".zarr":
        names = sorted(sub.name for sub in paths[0].iterdir() if sub.is_dir())
    else:
        with open_hdf5(paths[0]) as file:
            names = array_names(file, max_arrays=1000)
    variables = []
    for name in names:
        with suppress(DataError, ShapeError), open_source(f"{paths[0]}:{name}") as source:  # text; scalars
            variables += [name] if source.axes == "TYXC" else []
    if not variables:
        raise DataError(f"{paths[0]}: has no variable over time, latitude and longitude; give a folder of such files")
    pattern = str(Path(escape(str(paths[0].parent)), f"*{paths[0].suffix}"))
    dataset = ClimateFiles(pattern, variables)
    dataset.check()
    periodic = dataset.open_series(pattern).has_periodic_columns
    return FORECAST_TEMPLATE.format(
        files=_quote_yaml(pattern), variables=", ".join(map(_quote_yaml, variables)), outputs=len(variables),
        weights="" if dataset.fields.latitude is None else "weights: cos(lat)",
        padding="[replicate, wrap]" if periodic else "replicate",
        padding_comment="wrap: the longitudes of the files are periodic" if periodic
        else "padding_mode: [replicate, wrap] if the fields span all longitudes",
    )  # fmt: skip


def _image_and_mask_patterns_of_cases(folder: Path) -> list[str]:
    """Return the patterns of images and masks in a folder per case, such as case1/case1_t1.nii, case1/case1_seg.nii."""
    cases = [(sub.name, _list_images(sub)) for sub in folder.iterdir() if sub.is_dir()]
    ends_by_case = [{path.name.removeprefix(name) for path in paths} for name, paths in cases if paths]
    ends = sorted(ends_by_case[0]) if ends_by_case and all(ends == ends_by_case[0] for ends in ends_by_case) else []
    masks = [end for end in ends if _MASK_ENDING.search(end)]
    images = [end for end in ends if end not in masks]
    if len(masks) != 1 or not images:
        return []
    if images[1:]:
        emit(
            f"only one image of each case is used, *{images[0]}, not {', '.join(images[1:])}; edit `images`, or"
            " list a pattern for each channel"
        )
    return [str(Path(escape(str(folder)), "*", f"*{escape(end)}")) for end in (images[0], masks[0])]


def _image_and_mask_patterns_by_name(folder: Path) -> list[str]:
    """Return the patterns of images and masks in one folder, such as a.png and a_mask.png."""
    names = [] if any(folder.glob("*.csv")) else [path.name for path in _list_images(folder)]
    ends = {end for name in names for end in (name[at.start() :] for at in _MASK_ENDING.finditer(name)) if end[1:]}
    images_by_end = {end: [name for name in names if name.endswith(end)] for end in ends}
    for end, masks in sorted(images_by_end.items(), key=lambda item: -len(item[1])):
        image_names = [name for name in names if name not in masks]
        stems = [mask.removesuffix(end) for mask in masks]
        if all(stems) and image_names and all(any(name.startswith(stem) for name in image_names) for stem in stems):
            suffixes = {".nii.gz" if name.endswith(".nii.gz") else Path(name).suffix for name in image_names}
            name_ends = suffixes.pop() if len(suffixes) == 1 else ".*", end
            return [str(Path(escape(str(folder)), f"*{escape(name_end)}")) for name_end in name_ends]
    return []


def _inspect_masks(names: list[str]) -> tuple[set[int], int]:
    """Return the values in evenly spaced boxes of integer masks, or, for masks of floats, their number of channels."""
    import numpy as np

    from ..data.datasets.image_lists import open_mask

    boxes = []
    for name in names:
        with open_mask(name) as source:
            if source.dtype.kind == "f":
                return set(), source.shape[-1]
            box_starts = product(*(range(0, n, _INSPECTED_EXTENT) for n in source.shape))
            for start in box_starts:
                box = [(lo, min(lo + _INSPECTED_EXTENT, n)) for lo, n in zip(start, source.shape, strict=True)]
                boxes.append((name, box, math.prod(hi - lo for lo, hi in box)))
    values = set[int]()
    box_stride = -(-sum(size for *_, size in boxes) // _MAX_INSPECTED_CELLS)
    for name, group in groupby(boxes[::box_stride], key=lambda item: item[0]):
        with open_mask(name) as source:
            for _, box, _ in group:
                values |= set(np.unique(source.read(box)).tolist())
    return values, 0


def _choose_classes(values: set[int]) -> tuple[int, list[int], int | None]:
    """Return the number of classes, their values (empty if these are 0, 1, ...), and the value of unlabelled cells."""
    void = min(values) if min(values) < 0 else 255 if max(values) == 255 > len(values) else None
    for ignored in dict.fromkeys((void, None)):
        classes = sorted(values - {ignored})
        if len(classes) > 1 and classes[0] >= 0 and max(classes) < max(2 * len(classes), _MAX_SPARSE_NUMBER):
            return max(classes) + 1, [], ignored
    ignored = void if void is not None and void < 0 else None
    classes = sorted(values - {ignored})
    if len(classes) > _MAX_CLASSES or classes == [*range(len(classes))]:
        return max(classes, default=0) + 1, [], ignored
    return len(classes), classes, ignored


def _segmentation_yaml(image_pattern: str, mask_pattern: str) -> str:
    from ..data.datasets.image_lists import find_masks, list_images, match_files, match_images, require_same_format

    image_names, mask_names = match_images("images", image_pattern, mask_pattern), match_files("labels", mask_pattern)
    values, channels = _inspect_masks(mask_names)
    labels = _quote_yaml(mask_pattern)
    if channels:
        task = "Regression: numbers per cell, because the masks contain floats (classes are integers)"
        outputs, cost, metrics = channels, "!MSE {}", ""
    else:
        outputs, class_values, void = _choose_classes(values)
        if outputs < 2:
            mask_folder = Path(mask_names[0]).parent
            raise DataError(f"{mask_folder}: has only the values {sorted(values)}; give masks of two classes, or more")
        if outputs > _MAX_CLASSES:
            emit(
                f"warning: masks have values up to {outputs - 1}, each of them a class; if they number objects, write"
                " masks of classes, such as mask > 0, and run neondist init again"
            )
        values_text = f"the values {class_values}" if class_values else f"0 to {outputs - 1}"
        task = f"Segmentation: a class per cell; the masks contain {values_text}"
        cost, metrics = "!DiceCE {}", SEGMENTATION_METRICS
        if class_values:
            labels += f"\n  class_values: {class_values}     # values of classes 0, 1, ...; others are an error"
        else:
            labels += f"\n  classes: {outputs}             # other values in a mask are an error"
        if void is not None:
            task += f", and {void} for unlabelled cells"
            labels, cost = f"{labels}\n  ignore_index: {void}", f"!DiceCE {{ignore_index: {void}}}"
    crop, crops_per_image = _choose_crop_size_and_count([Path(name) for name in image_names])
    items = list_images(image_names, len(crop))
    require_same_format(items, tuple(crop), whole_images=False)
    find_masks(mask_pattern, items, len(crop))
    return EXPERIMENT_TEMPLATE.format(
        task=escape_invisible(task, keep=""),
        dataset=_image_files_yaml(image_pattern, labels, crop, crops_per_image, len(items)),
        layers=segmenter_layers(outputs), cost=cost, metrics=metrics,
        best=_best_yaml("validation" if items[1:] else "train", "loss"),
    )  # fmt: skip


def _image_files_yaml(pattern: str, labels: str, crop: list[int], crops_per_image: int, num_images: int) -> str:
    held_out_text = "0.2        # fraction of the images held out for validation"
    held_out_text = held_out_text if num_images > 1 else "null       # a single image; set 0.2 if there are more"
    return f"""!ImageFiles
  images: {_quote_yaml(pattern)}
  labels: {labels}
  crop: {crop}         # cells per sample; larger crops give more context
  crops_per_image: {crops_per_image}
  validation: {held_out_text}"""


def _best_yaml(split: str, number: str) -> str:
    """Return the field `best` for the loss or error of a split; training losses do not stop a run early."""
    if split == "train":
        return "!Best {number: train_loss}  # keeps checkpoint_best.h5"
    return f"!Best {{number: {split}_{number}, patience: 10}}  # keeps checkpoint_best.h5; early stopping"


def _find_images(folder: Path) -> tuple[Path, str] | None:
    """Return the folder of images in `folder`, or in its training split, and the pattern of subfolders, '' or '*'."""
    splits = [sub for sub in sorted(folder.iterdir()) if sub.name.lower() in ("train", "training") and sub.is_dir()]
    for base, subfolders in ((folder, ""), *((sub, pattern) for sub in splits for pattern in ("", "*")), (folder, "*")):
        if any(_list_images(sub) for sub in (base.glob(subfolders) if subfolders else [base]) if sub.is_dir()):
            return base, subfolders
    return None


def _list_images(folder: Path) -> list[Path]:
    from ..formats.table import has_known_suffix

    return sorted(path for path in folder.iterdir() if has_known_suffix(path) and not path.name.startswith("."))


def _image_pattern(folder: Path, subfolders: str = "") -> str:
    """Return the file pattern of the images in a folder or its subfolders."""
    folders = [sub for sub in (folder.glob(subfolders) if subfolders else [folder]) if sub.is_dir()]
    paths = [path for sub in folders for path in _list_images(sub)]
    kinds = {path.suffix for path in paths}
    if end := next((end for end in _CITYSCAPES_ENDINGS if any(path.stem.endswith(end) for path in paths)), ""):
        return str(Path(escape(str(folder)), subfolders, f"*{end}.png"))
    modalities = {match and match[0] for match in (re.search(r"_\d{4}\.nii(\.gz)?$", path.name) for path in paths)}
    if len(modalities) > 1 and None not in modalities:  # nnU-Net: case_0000.nii.gz, case_0001.nii.gz
        first, *rest = sorted(filter(None, modalities))
        emit(
            f"only one image of each case is used, *{first}, not {', '.join(rest)}; edit `images`, or list a pattern"
            " for each channel"
        )
        return str(Path(escape(str(folder)), subfolders, f"*{first}"))
    return str(Path(escape(str(folder)), subfolders, f"*{kinds.pop()}" if len(kinds) == 1 else "*.*"))


def _quote_yaml(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")


def _choose_crop_size_and_count(paths: list[Path]) -> tuple[list[int], int]:
    """Return crop extents that fit in all images, multiples of 8 if possible, and the number of crops of each image."""
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
    fitting_crops = min(math.prod(shape) for shape in shapes) // math.prod(crop)
    return crop, 1 if shapes == {tuple(crop)} else max(4, min(fitting_crops, _CROPS_PER_EPOCH // len(paths)))

"""Checkpoints of servers: a folder with one file of each, which any number of servers loads; export as one file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import SingleTransport
from ..errors import ConfigError, DataError, MissingPackageError, UserError
from ..geometry import Box
from ..io.checkpoint import Piece, opened, write
from ..io.checkpoint.read import Opened
from ..io.checkpoint.texts import plain_json
from ..io.files import make_folder, replacing
from .message import Message, MessageError
from .placement import ServerLayout, ServerPiece, TableSpec
from .progress import Credits
from .state import ServerState, UpdateRule
from .table import first_rows
from .updates import Slots

FORMAT = 1
LARGEST_TABLE = 4 << 30
"""Bytes of a table that is exported whole."""
_FILE = re.compile(r"server-(\d+)-of-(\d+)\.h5")


def save_state(state: ServerState, rule: UpdateRule, folder: Path, save: str) -> Callable[[], None]:
    """Return a function that writes a server's file as it is now.

    Rows that are made meanwhile do not disturb it; updates would.

    Parameters
    ----------
    rule : UpdateRule
        How it applies gradients.
    save : str
        Names this checkpoint among others, the same for all servers.
    """
    arrays: dict[str, np.ndarray] = {}
    layout = state.layout
    places = {piece.name: at for at, piece in enumerate(layout.pieces)}
    for dtype in layout.dtypes:
        slots = state.dense.slots[dtype]
        for piece, (start, stop) in zip(layout.of_dtype(dtype), layout.spans(dtype), strict=True):
            prefix = f"pieces/{places[piece.name]}"
            arrays[f"{prefix}/values"] = state.dense.values[dtype][start:stop]
            arrays |= {f"{prefix}/slots/{name}": one[start:stop] for name, one in slots.items() if one.ndim}
        arrays |= {f"scalars/{dtype}/{name}": one for name, one in slots.items() if not one.ndim}
    for at, spec in enumerate(layout.tables):
        table = state.tables[spec.name]
        arrays |= {f"tables/{at}/ids": table.ids, f"tables/{at}/values": table.values}
        arrays |= {f"tables/{at}/slots/{name}": one for name, one in table.slots.items()}
    header = {
        "format": FORMAT,
        "save": save,
        "version": state.version,
        "samples": state.samples,
        "credits": state.credits.described(),
        "layout": layout.described(),
        "optimizer": state.optimizer,
        "rule": rule.described(),
    }
    pieces = [Piece(name, one.shape, one, [Box.of(one.shape)]) for name, one in arrays.items()]
    path = file_of(folder, layout.index, layout.servers)

    def write_file() -> None:
        make_folder(folder)
        write(path, pieces, {"server": json.dumps(header)}, SingleTransport())

    return write_file


def file_of(folder: Path, index: int, servers: int) -> Path:
    """Return the file of a server in a checkpoint."""
    return folder / f"server-{index}-of-{servers}.h5"


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has a file of each server; they may still be of different checkpoints, or damaged."""
    return servers_of(folder) is not None


def servers_of(folder: Path) -> int | None:
    """Return the number of servers of a checkpoint; None if files are missing."""
    found = [matched for path in folder.glob("server-*.h5") if (matched := _FILE.fullmatch(path.name))]
    counts = {int(matched[2]) for matched in found}
    return len(found) if counts == {len(found)} else None


def read_configuration(folder: Path, index: int, servers: int) -> Message:
    """Return the layout, optimizer and rule of a server in a checkpoint of as many servers, as a message has them.

    Raises
    ------
    DataError
        The file is missing, or no file of a server.
    """
    path = file_of(folder, index, servers)
    if not path.is_file():
        raise DataError(f"{folder}: has no file for server {index} of {servers}; name another one")
    with opened(path, SingleTransport()) as file:
        return Message(_ServerFile(file).configuration)


def load_state(state: ServerState, folder: Path) -> None:
    """Fill a server's new state with its parts of a checkpoint of any number of servers.

    Raises
    ------
    DataError
        A file is missing or damaged, or the files are of different checkpoints, or of another model.
    """
    with _opened_all(folder) as files:
        first = files[0]
        if (first.optimizer["kind"], first.optimizer["name"]) != (state.optimizer["kind"], state.optimizer["name"]):
            there, here = first.optimizer["name"], state.optimizer["name"]
            raise DataError(f"{folder}: has the slots of {there}, and the model has {here}; use the same optimizer")
        layout = state.layout
        for dtype in layout.dtypes:
            slots = state.dense.slots[dtype]
            for piece, (start, stop) in zip(layout.of_dtype(dtype), layout.spans(dtype), strict=True):
                for name, whole in _whole_arrays(files, piece, folder).items():
                    if name:
                        slots.setdefault(name, np.empty(layout.size(dtype), dtype))
                    target = slots[name] if name else state.dense.values[dtype]
                    target[start:stop] = piece.of(whole).reshape(-1)
            slots.update(first.scalars(f"scalars/{dtype}"))
        for spec in layout.tables:
            for ids, values, slots in _table_rows(files, spec, folder):
                mine = ids % layout.servers == layout.index
                chosen = {name: one[mine] if one.ndim else one for name, one in slots.items()}
                state.tables[spec.name].restore(ids[mine], values[mine], chosen)
        state.version = max(file.version for file in files)
        state.samples, state.credits = first.samples, first.credits


def export_checkpoint(folder: Path, path: Path) -> None:
    """Write the parameters of a checkpoint as whole arrays, in one process.

    Parameters
    ----------
    folder : Path
        Of one checkpoint.
    path : Path
        Ends with '.h5': as a run's checkpoint.h5, with the optimiser's slots; with '.safetensors': the parameters.

    Raises
    ------
    UserError
        As `load_state`; a table is too large; or the file cannot be written.
    """
    if path.suffix not in (".h5", ".safetensors"):
        raise ConfigError(f"{path}: expected a name that ends with .h5 or .safetensors")
    with _opened_all(folder) as files:
        found: dict[str, np.ndarray] = {}
        pieces = {piece.name: piece for file in files for piece in file.layout.pieces}
        for piece in pieces.values():
            for slot, whole in _whole_arrays(files, piece, folder).items():
                name = f"optimizer/{piece.name}/{slot}" if slot else f"model/{piece.name}"
                found[name] = whole.reshape(piece.shape)
        for spec in files[0].layout.tables:
            found[f"model/{spec.name}"] = _whole_table(files, spec, folder)
        version = max(file.version for file in files)
    if path.suffix == ".h5":
        whole_pieces = [Piece(name, one.shape, one, [Box.of(one.shape)]) for name, one in found.items()]
        write(path, whole_pieces, {"position": json.dumps({"step": version})}, SingleTransport())
        return
    try:
        from safetensors.numpy import save
    except ImportError:
        raise MissingPackageError(f"{path}: needs safetensors: pip install 'neondist[torch]'") from None
    weights = {name[len("model/") :]: one for name, one in found.items() if name.startswith("model/")}
    with replacing(path) as file:
        file.write(save(weights, {"step": str(version)}))


class _ServerFile:
    """One server's file of a checkpoint."""

    def __init__(self, file: Opened) -> None:
        self._file, self.path = file, file.facts.path
        try:
            header = plain_json(file.facts.texts["server"], dict)
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}")
            self.save, self.version, self.samples = (
                str(header["save"]),
                int(header["version"]),
                float(header["samples"]),
            )
            self.credits = Credits.parse(header["credits"])
            self.layout = ServerLayout.parse(header["layout"])
            self.optimizer = {"kind": str(header["optimizer"]["kind"]), "name": str(header["optimizer"]["name"])}
            self.configuration = {name: header[name] for name in ("layout", "optimizer", "rule")}
        except (KeyError, TypeError, ValueError, MessageError, UserError) as error:
            raise DataError(f"{self.path}: is not a file written by a server ({error})") from None

    def read(self, name: str, dtype: Any, size: int | None = None) -> np.ndarray:
        """Return an array of the file; DataError if it is missing, or of another size."""
        shape = self._file.facts.shapes.get(name)
        if shape is None or size not in (None, prod(shape)):
            raise DataError(f"{self.path}: '{name}' is missing, or has another size")
        array = np.empty(shape, dtype)
        self._file.fill([Piece(name, shape, array, [Box.of(shape)])])
        return array

    def slots(self, prefix: str) -> list[str]:
        """Return the names of the slots in a group."""
        return list(self._file.facts.group(f"{prefix}/slots"))

    def scalars(self, prefix: str) -> Slots:
        """Return slots that are one number."""
        return {name: self.read(f"{prefix}/{name}", "float32") for name in self._file.facts.group(prefix)}

    def is_scalar(self, name: str) -> bool:
        """Whether an array is one number."""
        return self._file.facts.shapes[name] == ()


@contextmanager
def _opened_all(folder: Path) -> Iterator[list[_ServerFile]]:
    """Yield the files of all servers of a checkpoint."""
    found = sorted(path for path in folder.glob("server-*.h5") if _FILE.fullmatch(path.name))
    counts = {int(matched[2]) for path in found if (matched := _FILE.fullmatch(path.name))}
    if len(counts) != 1 or len(found) != (count := counts.pop()):
        raise DataError(f"{folder}: is not a complete checkpoint of servers ({len(found)} files); name another one")
    with ExitStack() as stack:
        files = [_ServerFile(stack.enter_context(opened(path, SingleTransport()))) for path in found]
        if len({file.save for file in files}) > 1:
            raise DataError(f"{folder}: its {count} files belong to different checkpoints; name another one")
        yield files


def _whole_arrays(files: Sequence[_ServerFile], piece: ServerPiece, folder: Path) -> dict[str, np.ndarray]:
    """Return a parameter, under '', and its slots, as flat arrays of the whole."""
    found: dict[str, np.ndarray] = {}
    covered = 0
    for file in files:
        for at, source in enumerate(file.layout.pieces):
            if source.name != piece.name:
                continue
            if source.shape != piece.shape or source.dtype != piece.dtype:
                there, here = (f"{one.dtype} {one.shape}" for one in (source, piece))
                raise DataError(f"{folder}: parameter '{piece.name}' is {there}, and {here} in the model")
            covered += source.box.size
            names = {"": f"pieces/{at}/values"}
            names |= {slot: f"pieces/{at}/slots/{slot}" for slot in file.slots(f"pieces/{at}")}
            for slot, name in names.items():
                whole = found.setdefault(slot, np.empty(prod(piece.shape), piece.dtype))
                part = file.read(name, piece.dtype, source.box.size)
                source.of(whole)[...] = part.reshape(source.box.shape)
    if covered != prod(piece.shape):
        raise DataError(f"{folder}: has no parameter '{piece.name}', or not all of it; it belongs to another model")
    return found


def _table_rows(
    files: Sequence[_ServerFile], spec: TableSpec, folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray, Slots]]:
    """Yield ids, rows and slots of a table, one server's at a time."""
    for file in files:
        sources = {table.name: at for at, table in enumerate(file.layout.tables)}
        if spec.name not in sources:
            raise DataError(f"{folder}: has no table '{spec.name}'; it belongs to another model")
        at = sources[spec.name]
        if (theirs := file.layout.tables[at]).dim != spec.dim or theirs.rows != spec.rows:
            there, here = (f"{one.rows} x {one.dim}" for one in (theirs, spec))
            raise DataError(f"{folder}: table '{spec.name}' is {there}, and {here} in the model")
        ids = file.read(f"tables/{at}/ids", np.int64)
        values = file.read(f"tables/{at}/values", spec.dtype, len(ids) * spec.dim)
        slots = {}
        for name in file.slots(f"tables/{at}"):
            full = f"tables/{at}/slots/{name}"
            scalar = file.is_scalar(full)
            slots[name] = file.read(full, "float32") if scalar else file.read(full, spec.dtype, values.size)
        yield ids, values, slots


def _whole_table(files: Sequence[_ServerFile], spec: TableSpec, folder: Path) -> np.ndarray:
    if (size := spec.rows * spec.dim * np.dtype(spec.dtype).itemsize) > LARGEST_TABLE:
        raise ConfigError(f"{folder}: table '{spec.name}' takes {size / 1e9:.1f} GB, too much for one array")
    whole = first_rows(spec, np.arange(spec.rows))
    for ids, values, _ in _table_rows(files, spec, folder):
        whole[ids] = values
    return whole

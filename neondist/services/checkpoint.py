"""Parameter-server checkpoints: one file per server, loaded by any number of servers, or exported to one file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from ..comm import SingleTransport
from ..errors import ConfigError, DataError, MissingPackageError, UserError
from ..geometry import Box
from ..io.checkpoint import ArrayPart, open_checkpoint, write_checkpoint
from ..io.checkpoint.read import CheckpointReader
from ..io.checkpoint.texts import parse_json
from ..io.files import atomic_replacement, make_folder
from ..terminal.console import counted
from .message import Message, MessageError
from .placement import EmbeddingTableSpec, ServerLayout, ServerPiece
from .progress import AppliedMinibatches
from .state import ServerState, SyncPolicy
from .table import initial_rows
from .updates import Slots

FORMAT_VERSION = 1
MAX_EXPORTED_TABLE_BYTES = 4 << 30
_SERVER_FILE_PATTERN = re.compile(r"server-(\d+)-of-(\d+)\.h5")


def make_state_writer(state: ServerState, policy: SyncPolicy, folder: Path, save_id: str) -> Callable[[], None]:
    """Return a function that writes the file of a server in its current state.

    Until the function has run, table rows may be added, but values must not be updated.

    Parameters
    ----------
    policy : SyncPolicy
        Policy by which the server applies gradients.
    save_id : str
        Identifier of this checkpoint, the same for all servers.
    """
    arrays: dict[str, np.ndarray] = {}
    layout = state.layout
    indices = {piece.name: index for index, piece in enumerate(layout.pieces)}
    for dtype in layout.dtypes:
        slots = state.dense_parameters.slots[dtype]
        for piece, cells in layout.pieces_of_dtype(dtype):
            prefix = f"pieces/{indices[piece.name]}"
            arrays[f"{prefix}/values"] = state.dense_parameters.values[dtype][cells]
            arrays |= {f"{prefix}/slots/{name}": array[cells] for name, array in slots.items() if array.ndim}
        arrays |= {f"scalars/{dtype}/{name}": array for name, array in slots.items() if not array.ndim}
    for index, spec in enumerate(layout.tables):
        table = state.tables[spec.name]
        arrays |= {f"tables/{index}/ids": table.ids, f"tables/{index}/values": table.values}
        arrays |= {f"tables/{index}/slots/{name}": array for name, array in table.slots.items()}
    header = {
        "format": FORMAT_VERSION,
        "save": save_id,
        "version": state.version,
        "samples": state.samples,
        "credits": state.applied_minibatches.to_json(),
        "layout": layout.to_json(),
        "optimizer": state.optimizer,
        "policy": policy.to_json(),
    }
    array_parts = [ArrayPart(name, array.shape, array, [Box.of(array.shape)]) for name, array in arrays.items()]
    path = server_file_path(folder, layout.index, layout.servers)

    def write_file() -> None:
        make_folder(folder)
        write_checkpoint(path, array_parts, {"server": json.dumps(header)}, SingleTransport())

    return write_file


def server_file_path(folder: Path, index: int, servers: int) -> Path:
    """Return the path of the file of a server in a checkpoint."""
    return folder / f"server-{index}-of-{servers}.h5"


def count_servers(folder: Path) -> int | None:
    """Return the number of servers of a checkpoint by the names of its files; None if the set is incomplete."""
    paths = _list_server_files(folder)
    counts = {int(path.stem.rpartition("-")[2]) for path in paths}
    return len(paths) if counts == {len(paths)} else None


def _list_server_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("server-*.h5") if _SERVER_FILE_PATTERN.fullmatch(path.name))


def read_configuration(folder: Path, index: int, servers: int) -> Message:
    """Return a message with the layout, optimizer and policy of a server in a checkpoint of `servers` servers.

    Raises
    ------
    DataError
        The file is missing, or is not a server's checkpoint file.
    """
    path = server_file_path(folder, index, servers)
    if not path.is_file():
        raise DataError(f"{folder}: has no file for server {index} of {servers}; specify a complete checkpoint")
    with open_checkpoint(path, SingleTransport()) as file:
        return Message(_ServerFile(file).configuration)


def load_state(state: ServerState, folder: Path) -> None:
    """Load a server's parts of a checkpoint of any number of servers into a new state.

    Raises
    ------
    DataError
        A file is missing or damaged, or the files belong to different checkpoints, another model or another optimiser.
    """
    with _open_server_files(folder) as files:
        first = files[0]
        if (first.optimizer["kind"], first.optimizer["name"]) != (state.optimizer["kind"], state.optimizer["name"]):
            saved, current = first.optimizer["name"], state.optimizer["name"]
            raise DataError(f"{folder}: was written with optimizer {saved}, but the model has {current}; use {saved}")
        layout = state.layout
        for dtype in layout.dtypes:
            slots = state.dense_parameters.slots[dtype]
            for piece, cells in layout.pieces_of_dtype(dtype):
                for name, whole in _read_parameter_and_slots(files, piece, folder).items():
                    if name:
                        slots.setdefault(name, np.empty(layout.flat_size(dtype), dtype))
                    target = slots[name] if name else state.dense_parameters.values[dtype]
                    target[cells] = piece.part_of(whole).reshape(-1)
            slots |= first.read_slots(f"scalars/{dtype}", dtype, layout.flat_size(dtype))
        for spec in layout.tables:
            for ids, values, slots in _read_table_rows(files, spec, folder):
                owned_mask = ids % layout.servers == layout.index
                owned_slots = {name: array[owned_mask] if array.ndim else array for name, array in slots.items()}
                state.tables[spec.name].restore(ids[owned_mask], values[owned_mask], owned_slots)
        state.version = max(file.version for file in files)
        state.samples, state.applied_minibatches = first.samples, first.applied_minibatches


def export_checkpoint(folder: Path, path: Path) -> None:
    """Export the parameters of a checkpoint to one file of whole arrays, in one process.

    Parameters
    ----------
    folder : Path
        Folder of a checkpoint.
    path : Path
        File to write. '.h5': like checkpoint.h5 of a run, with the slots of dense parameters; '.safetensors': only the
        parameters.

    Raises
    ------
    UserError
        As for `load_state`; a table is too large; safetensors is not installed; or the file cannot be written.
    """
    if path.suffix not in (".h5", ".safetensors"):
        raise ConfigError(f"{path}: expected a name that ends with .h5 or .safetensors")
    with _open_server_files(folder) as files:
        arrays: dict[str, np.ndarray] = {}
        pieces = {piece.name: piece for file in files for piece in file.layout.pieces}
        for piece in pieces.values():
            for slot, whole in _read_parameter_and_slots(files, piece, folder).items():
                name = f"optimizer/{piece.name}/{slot}" if slot else f"model/{piece.name}"
                arrays[name] = whole.reshape(piece.shape)
        for spec in files[0].layout.tables:
            arrays[f"model/{spec.name}"] = _read_whole_table(files, spec, folder)
        version = max(file.version for file in files)
    if path.suffix == ".h5":
        array_parts = [ArrayPart(name, array.shape, array, [Box.of(array.shape)]) for name, array in arrays.items()]
        write_checkpoint(path, array_parts, {"position": json.dumps({"step": version})}, SingleTransport())
        return
    try:
        from safetensors.numpy import save
    except ImportError:
        raise MissingPackageError(f"{path}: needs safetensors: pip install 'neondist[torch]'") from None
    weights = {name[len("model/") :]: array for name, array in arrays.items() if name.startswith("model/")}
    with atomic_replacement(path) as file:
        file.write(save(weights, {"step": str(version)}))


class _ServerFile:
    """File of a server in a checkpoint."""

    def __init__(self, file: CheckpointReader) -> None:
        self._file, self.path = file, file.contents.path
        try:
            header = parse_json(file.contents.texts["server"], dict)
            if header["format"] != FORMAT_VERSION:
                raise ValueError(f"format {header['format']} instead of {FORMAT_VERSION}")
            self.save_id = str(header["save"])
            self.version = int(header["version"])
            self.samples = float(header["samples"])
            self.applied_minibatches = AppliedMinibatches.parse(header["credits"])
            self.layout = ServerLayout.parse(header["layout"])
            self.optimizer = {"kind": str(header["optimizer"]["kind"]), "name": str(header["optimizer"]["name"])}
            self.configuration = {name: header[name] for name in ("layout", "optimizer", "policy")}
        except (KeyError, TypeError, ValueError, MessageError, UserError) as error:
            raise DataError(f"{self.path}: was not written by a server ({error}); specify another checkpoint") from None

    def read_array(self, name: str, dtype: DTypeLike, size: int | None = None) -> np.ndarray:
        """Return an array of the file; DataError if it is missing or does not have `size` elements (None: any)."""
        shape = self._file.contents.shapes.get(name)
        if shape is None or size not in (None, prod(shape)):
            raise DataError(f"{self.path}: '{name}' is missing, or has another size; specify another checkpoint")
        array = np.empty(shape, dtype)
        self._file.fill_parts([ArrayPart(name, shape, array, [Box.of(shape)])])
        return array

    def slot_names(self, prefix: str) -> list[str]:
        return list(self._file.contents.group(prefix))

    def read_slots(self, prefix: str, dtype: DTypeLike, size: int) -> Slots:
        shapes, slots = self._file.contents.shapes, Slots()
        for name in self.slot_names(prefix):
            path = f"{prefix}/{name}"
            slots[name] = self.read_array(path, dtype, size) if shapes[path] else self.read_array(path, "float32")
        return slots


@contextmanager
def _open_server_files(folder: Path) -> Iterator[list[_ServerFile]]:
    paths, count = _list_server_files(folder), count_servers(folder)
    if count is None:
        raise DataError(
            f"{folder}: is not a complete parameter-server checkpoint ({counted(len(paths), 'file')}); specify"
            " another folder"
        )
    with ExitStack() as stack:
        files = [_ServerFile(stack.enter_context(open_checkpoint(path, SingleTransport()))) for path in paths]
        if len({file.save_id for file in files}) > 1:
            raise DataError(f"{folder}: its {count} files belong to different checkpoints; specify another folder")
        yield files


def _read_parameter_and_slots(files: Sequence[_ServerFile], piece: ServerPiece, folder: Path) -> dict[str, np.ndarray]:
    """Return a complete parameter, under the key '', and its slots, under their names, as flat arrays."""
    arrays_by_slot: dict[str, np.ndarray] = {}
    covered_cells = 0
    for file in files:
        for index, source in enumerate(file.layout.pieces):
            if source.name != piece.name:
                continue
            if source.shape != piece.shape or source.dtype != piece.dtype:
                saved, current = (f"{piece_spec.dtype} {piece_spec.shape}" for piece_spec in (source, piece))
                raise DataError(
                    f"{folder}: '{piece.name}' is {saved}, but {current} in the model; specify another folder"
                )
            covered_cells += source.box.size
            array_names = {"": f"pieces/{index}/values"}
            array_names |= {slot: f"pieces/{index}/slots/{slot}" for slot in file.slot_names(f"pieces/{index}/slots")}
            for slot, name in array_names.items():
                complete = arrays_by_slot.setdefault(slot, np.empty(prod(piece.shape), piece.dtype))
                part = file.read_array(name, piece.dtype, source.box.size)
                source.part_of(complete)[...] = part.reshape(source.box.shape)
    if covered_cells != prod(piece.shape):
        raise DataError(f"{folder}: does not have all of '{piece.name}'; specify a checkpoint of this model")
    return arrays_by_slot


def _read_table_rows(
    files: Sequence[_ServerFile], spec: EmbeddingTableSpec, folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray, Slots]]:
    """Yield the ids, rows and slots of a table, server by server."""
    for file in files:
        indices = {table.name: index for index, table in enumerate(file.layout.tables)}
        if spec.name not in indices:
            raise DataError(f"{folder}: has no table '{spec.name}'; specify a checkpoint of this model")
        index = indices[spec.name]
        if (saved_spec := file.layout.tables[index]).dim != spec.dim or saved_spec.rows != spec.rows:
            saved, current = (f"{table.rows} x {table.dim}" for table in (saved_spec, spec))
            raise DataError(f"{folder}: '{spec.name}' is {saved}, but {current} in the model; specify another folder")
        ids = file.read_array(f"tables/{index}/ids", np.int64)
        values = file.read_array(f"tables/{index}/values", spec.dtype, len(ids) * spec.dim)
        yield ids, values, file.read_slots(f"tables/{index}/slots", spec.dtype, values.size)


def _read_whole_table(files: Sequence[_ServerFile], spec: EmbeddingTableSpec, folder: Path) -> np.ndarray:
    if (size := spec.rows * spec.dim * np.dtype(spec.dtype).itemsize) > MAX_EXPORTED_TABLE_BYTES:
        raise ConfigError(
            f"{folder}: table '{spec.name}' of {size / 1e9:.1f} GB is too large to export; load it on servers"
        )
    rows = initial_rows(spec, np.arange(spec.rows))
    for ids, values, _ in _read_table_rows(files, spec, folder):
        rows[ids] = values
    return rows

"""Loggers of epoch records, in local TensorBoard and MLflow files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from ...comm import all_or_none
from ...errors import ConfigError, MissingPackageError
from ...registry import Registered
from ..state import EpochRecord, TrainState, nonfinite_to_none
from .hook import Hook


class MetricLogger(Registered, Hook):
    """Base class of loggers, which log every epoch's numbers on rank 0; values per class are named NAME/0, NAME/1, ....

    Parameters
    ----------
    folder : path, optional
        Output folder; default: in the folder of the run.
    """

    package: str
    name: str
    experiment_yaml: str | None = None
    #: the field of a record that is logged as the step
    step_field: str = "epoch"

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = self.output_folder = None if folder is None else Path(folder)

    def set_run_folder(self, folder: Path | None, experiment_yaml: str | None = None) -> None:
        """Set the run's folder and its YAML text; raise ConfigError if there is no folder to write to."""
        self.experiment_yaml = experiment_yaml
        self.output_folder = self.folder or (None if folder is None else folder / self.name)
        if self.output_folder is None:
            raise ConfigError(
                f"{type(self).__name__}: folder: the run has no output folder; pass output to the run, or set folder"
            )

    def check_package_installed(self) -> None:
        """Raise MissingPackageError if the package is not installed."""
        try:
            import_module(self.package)
        except ImportError:
            class_name = type(self).__name__
            raise MissingPackageError(f"{class_name} needs {self.package}: pip install 'neondist[loggers]'") from None

    def before_run(self, run: TrainState) -> None:
        """Start the log, and write the epochs that were complete before the run continues."""
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                self.start_log(run)
                for record in run.history:
                    self.write_record(record)

    def after_epoch(self, run: TrainState) -> None:
        """Write the epoch's numbers."""
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                self.write_record(run.history[-1])

    def after_run(self, run: TrainState) -> None:
        """End the log."""
        if run.is_first_rank:
            self.end_log()

    def on_stop(self, run: TrainState) -> None:
        """End the log."""
        self.after_run(run)

    def on_error(self, run: TrainState, error: BaseException) -> None:
        """End the log."""
        self.after_run(run)

    @abstractmethod
    def start_log(self, run: TrainState) -> None:
        """Start a new log, without records."""

    @abstractmethod
    def write_record(self, record: EpochRecord) -> None:
        """Write the numbers of an epoch."""

    @abstractmethod
    def end_log(self) -> None:
        """End the log, if it was started."""


class TensorBoard(MetricLogger):
    """MetricLogger that writes TensorBoard event files (tensorboardX), indexed by epoch, or by step in a session.

    Parameters
    ----------
    folder : path, optional
        Output folder. Default: 'tensorboard' in the folder of the run.
    """

    package, name = "tensorboardX", "tensorboard"
    writer: Any = None

    def start_log(self, run: TrainState) -> None:
        """Open a new event file, which hides the values of earlier files."""
        self.writer = import_module(self.package).SummaryWriter(str(self.output_folder), purge_step=0)

    def write_record(self, record: EpochRecord) -> None:
        """Log all values."""
        for name, value in finite_numbers(record):
            self.writer.add_scalar(name, value, record[self.step_field])
        self.writer.flush()

    def end_log(self) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


MLFLOW_DATABASE_FILE = "mlflow.db"


class MLflow(MetricLogger):
    """MetricLogger that writes to a local MLflow store, shown by `mlflow ui --backend-store-uri sqlite:///FILE`.

    The parameters of the MLflow run are the experiment's fields.

    Parameters
    ----------
    folder : path, optional
        Folder of the store mlflow.db. Default: 'mlflow' in the folder of the run.
    """

    package, name = "mlflow", "mlflow"
    mlflow_client: Any = None

    def start_log(self, run: TrainState) -> None:
        """Start a new run, with the fields of the experiment as its parameters."""
        assert self.output_folder is not None
        self.output_folder.mkdir(parents=True, exist_ok=True)
        database_path = self.output_folder.resolve() / MLFLOW_DATABASE_FILE
        self.mlflow_client = import_module(self.package).MlflowClient(tracking_uri=f"sqlite:///{database_path}")
        self.run_id = self.mlflow_client.create_run("0", run_name=self.output_folder.resolve().parent.name).info.run_id
        for name, value in experiment_fields_by_path(self.experiment_yaml or ""):
            self.mlflow_client.log_param(self.run_id, name[:250], value[:500])

    def write_record(self, record: EpochRecord) -> None:
        """Log all values."""
        for name, value in finite_numbers(record):
            self.mlflow_client.log_metric(self.run_id, name, value, step=record[self.step_field])

    def end_log(self) -> None:
        """End the run."""
        if self.mlflow_client is not None:
            self.mlflow_client.set_terminated(self.run_id)
            self.mlflow_client = None


def experiment_fields_by_path(experiment_yaml: str) -> Iterator[tuple[str, str]]:
    """Yield path (as in `--set`) and value of each field of an experiment in YAML; an object's value is its tag."""
    root = yaml.compose(experiment_yaml, Loader=yaml.SafeLoader)
    return iter(()) if root is None else _flatten_fields(root, "")


def _flatten_fields(node: yaml.Node, path: str) -> Iterator[tuple[str, str]]:
    if node.tag.startswith("!") and not isinstance(node, yaml.ScalarNode):
        yield path or "experiment", node.tag[1:]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _flatten_fields(value, f"{path}.{key.value}".lstrip("."))
    elif isinstance(node, yaml.ScalarNode):
        if node.value != "null":
            yield path, node.value
    elif node.value and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        yield path, ", ".join(item.value for item in node.value)
    else:
        for at, item in enumerate(node.value):
            yield from _flatten_fields(item, f"{path}.{at}")


def finite_numbers(record: EpochRecord) -> Iterator[tuple[str, float]]:
    """Yield each finite number of a record except the epoch, with its name, also from lists and mappings."""
    for name, value in record.items():
        for path, number in _flatten_value(name, nonfinite_to_none(value)):
            if name != "epoch" and type(number) in (int, float):
                yield path, number


def _flatten_value(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (list, dict)):
        yield name, value
        return
    for at, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flatten_value(f"{name}/{at}", item)

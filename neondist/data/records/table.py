"""Records in a table of a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import DataError, MissingPackageError
from .base import BadRecordError, RecordReader


class SQLTableRecords(RecordReader):
    """Rows of a table or view, all read at once: ordered by the primary key, if any, or as returned by the database.

    Rows are arrays of float64, or of text if the first row has text or dates; in text, a missing value is empty.

    Parameters
    ----------
    url : str
        SQLAlchemy URL, followed by #TABLE (or #VIEW) unless the database has only one table.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            import sqlalchemy
        except ImportError as error:
            raise MissingPackageError(
                f"{url.partition(':')[0]}: needs SQLAlchemy; pip install 'neondist[tables]'"
            ) from error
        database_url, _, table = url.partition("#")
        self._rows: list[Any] = []
        try:
            parsed_url = sqlalchemy.make_url(database_url)
            self.source = f"{parsed_url.render_as_string(hide_password=True)}{'#' if table else ''}{table}"
            engine = sqlalchemy.create_engine(parsed_url)
            if engine.url.get_backend_name() == "sqlite":
                self._require_sqlite_file(engine.url.database)
            with engine.connect() as connection:
                sql_table = self._find_table(sqlalchemy, engine, table)
                self.column_names = [column.name for column in sql_table.columns]
                query = sqlalchemy.select(sql_table).order_by(*sql_table.primary_key.columns)
                self._rows = [tuple(row) for row in connection.execute(query)]
            engine.dispose()
        except ImportError as error:
            problem = f"cannot be read without the database driver {error.name}; install it"
            raise DataError(f"{self.source}: {problem}") from error
        except sqlalchemy.exc.SQLAlchemyError as error:
            problem = f"cannot be read ({str(error).splitlines()[0]}); check the URL and the database"
            raise DataError(f"{self.source}: {problem}") from error
        if not self._rows:
            raise DataError(f"{self.source}: has no rows; specify another table")
        self._is_text = not all(isinstance(value, bytes | None) or _is_number(value) for value in self._rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, record_numbers: Sequence[int]) -> list[np.ndarray]:
        """Return rows by their numbers."""
        return [self._convert_row(number) for number in record_numbers]

    def _convert_row(self, number: int) -> np.ndarray:
        row = self._rows[number]
        if self._is_text:
            return np.array(["" if value is None else str(value) for value in row])
        for name, value in zip(self.column_names, row, strict=True):
            if not _is_number(value):
                problem = f"row {number}: column {name}: {repr(value)[:40]} is not a number"
                raise BadRecordError(
                    number, f"{self.source}: {problem}; correct the row, or skip it with --skip-bad-records"
                )
        return np.array(row, np.float64)

    def _require_sqlite_file(self, path: str | None) -> None:
        from pathlib import Path

        if path in (None, "", ":memory:") or not Path(str(path)).is_file():
            raise DataError(f"{self.source}: no database {path}; correct the URL")

    def _find_table(self, sqlalchemy: Any, engine: Any, table: str) -> Any:
        inspector = sqlalchemy.inspect(engine)
        table_names = inspector.get_table_names()
        names = [*table_names, *inspector.get_view_names()]
        if not table and 1 in (len(table_names), len(names)):
            table = names[0]
        if table not in names:
            contents = f"the database has {', '.join(names) or 'none'}"
            if not table:
                raise DataError(f"{self.source}: specify a table, as URL#TABLE; {contents}")
            raise DataError(f"{self.source}: no table '{table}'; {contents}")
        sql_table = sqlalchemy.Table(table, sqlalchemy.MetaData(), autoload_with=engine)
        for column in sql_table.columns:
            if isinstance(column.type, sqlalchemy.Numeric):
                column.type.asdecimal = False  # a Decimal would be rounded to the column's digits, or to 10
        return sql_table


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str | bytes)

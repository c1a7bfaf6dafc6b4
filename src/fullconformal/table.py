"""Tables of numbers and categories: reading them, telling columns apart, and encoding them by scikit-learn's own encoders."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api import types
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

PARQUET = (".parquet", ".pq")
LARGEST = 1e150  # numbers whose squares, and sums of many of them, are finite
SEVERAL = 10  # different numbers that are a quantity rather than codes
FEW = 100  # distinct words that any column may have, and categories that get a column of their own
MISSING = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "?"]


class TableError(ValueError):
    """A table cannot be read, or does not hold what is needed."""


def read_table(path: Path | str, words: Sequence[str] = ()) -> pd.DataFrame:
    """The rows of a CSV (.gz, .zip and the like too) or Parquet file; columns in `words` are read as text."""
    path = Path(path)
    if path.is_dir():
        raise TableError(f"{path} is a folder; give a CSV or Parquet file.")
    try:
        if path.suffix.lower() in PARQUET:
            frame = pd.read_parquet(path)
        else:
            check_first_line(path)
            text = dict.fromkeys(words, "str")
            frame = pd.read_csv(path, dtype=text, na_values=MISSING, keep_default_na=False, low_memory=False)
    except FileNotFoundError as error:
        raise TableError(f"{path}: there is no such file.") from error
    except ImportError as error:
        raise TableError(f"{path}: Parquet needs pyarrow; pip install pyarrow, or give a CSV file.") from error
    except TableError:
        raise
    except pd.errors.EmptyDataError as error:
        raise TableError(f"{path} is empty; the first line must name the columns.") from error
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path} cannot be read as a table: it is not in UTF-8. Save it as 'CSV UTF-8', or convert it (iconv -f latin1 -t utf-8)."
        ) from error
    except Exception as error:  # many kinds: not text, quotes left open, no Parquet, no gzip
        raise TableError(f"{path} cannot be read as a table: {' '.join(str(error).split())[:200]}") from error
    frame.columns = [str(name) for name in frame.columns]
    if any("\0" in name for name in frame.columns):
        raise TableError(f"{path} cannot be read as a table: it is no text.")
    if frame.empty:
        raise TableError(f"{path} has no rows.")
    if path.suffix.lower() not in PARQUET and not frame.index.equals(pd.RangeIndex(len(frame))):  # names were shifted
        raise TableError(
            f"{path}: its rows have more fields than its first line has names; name every column, and end no line with a comma."
        )
    return frame


def check_first_line(path: Path) -> None:
    """Raise where the first line of a CSV file is separated by other marks, or names a column twice."""
    if not path.is_file():  # what is read from a pipe can be read once
        return
    line = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
    if any("\0" in name for name in line):
        raise TableError(f"{path} cannot be read as a table: it is no text.")
    other = next((mark for mark in (";", "\t", "|") if mark in line[0]), None)
    if other and len(line) == 1:
        raise TableError(f"{path} separates its columns by {other!r}; write it with commas, and numbers with points.")
    twice = line[line.duplicated() & (line != "")].unique().tolist()
    if twice:
        raise TableError(f"{path} has more than one column named {listed(twice)}; give each a name of its own.")


@dataclass(frozen=True)
class Schema:
    """Which columns of a table are numbers and which are categories, and which is to be predicted."""

    target: str
    numbers: list[str]
    categories: list[str]
    left_out: list[str]

    @property
    def columns(self) -> list[str]:
        """The columns that are used."""
        return [*self.numbers, *self.categories]

    @classmethod
    def of(cls, frame: pd.DataFrame, target: str, drop: Sequence[str] = ()) -> Schema:
        """What the columns of a training table are, or a `TableError` that says which cannot be used."""
        for name in (target, *drop):
            check_name(frame, name, "--target" if name == target else "--drop")
        numbers, categories, left_out, refused = [], [], list(dict.fromkeys(drop)), {}
        for name, column in frame.items():
            if name == target or name in drop:
                continue
            if column.isna().all() or is_row_number(column):
                left_out.append(str(name))
            elif is_number(column):
                numbers.append(str(name))
            elif why := no_categories(column):
                words = strays(column)
                mend = (
                    f", numbers but for {listed(words)}: mend or empty these cells if it is a quantity" if words else ""
                )
                refused[str(name)] = why + mend
            else:
                categories.append(str(name))
        if refused:  # all at once, so that one more try will do
            told = "; ".join(f"the column {name!r} holds {why}" for name, why in refused.items())
            raise TableError(
                f"{told}. Leave out what is neither number nor category: "
                + " ".join(f"--drop {quoted(name)}" for name in refused)
            )
        if not numbers and not categories:
            raise TableError(f"besides the target {target!r} there is no column to predict from.")
        return cls(target, numbers, categories, left_out)

    @classmethod
    def of_json(cls, values: Any) -> Schema:
        """A schema that was kept as JSON."""
        good = isinstance(values, dict) and set(values) == set(cls.__dataclass_fields__)
        if not good or not isinstance(values["target"], str):
            raise TableError("it holds no description of a table's columns.")
        for name in ("numbers", "categories", "left_out"):
            if not (isinstance(values[name], list) and all(isinstance(part, str) for part in values[name])):
                raise TableError("it holds no description of a table's columns.")
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        """The schema as JSON."""
        return asdict(self)

    def objects(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The columns that are used, numbers as float64 and categories as text; columns may be in any order, and more."""
        lacking = [name for name in self.columns if name not in frame.columns]
        if lacking:
            raise TableError(
                f"the table lacks the column{'s' * (len(lacking) > 1)} {listed(lacking)}, which the predictor was fitted on."
            )
        out: dict[str, Any] = {name: as_numbers(frame[name], name) for name in self.numbers}
        out |= {name: as_words(frame[name]) for name in self.categories}
        return pd.DataFrame(out, columns=self.columns)

    def labels(self, frame: pd.DataFrame) -> Any:
        """The target (n,), which must be complete and look like classes."""
        column = frame[self.target]
        missing = int(column.isna().sum())
        if missing:
            raise TableError(
                f"the target {self.target!r} is missing in {missing:,} of {len(column):,} rows; leave these rows out "
                "(--drop-missing)."
            )
        values = column.to_numpy()
        if is_number(column):
            whole = bool(np.isfinite(values).all() and (values == np.floor(values)).all())
            if not whole or (len(np.unique(values)) > FEW and len(np.unique(values)) > len(values) / 20):
                raise TableError(
                    f"the target {self.target!r} holds {len(np.unique(values)):,} different numbers: that is a quantity, and "
                    "this predicts classes. Give a column of classes, or cut the numbers into a few."
                )
            return values.astype(np.int64)
        words = as_words(column).to_numpy(dtype=str)
        distinct = len(np.unique(words))
        if distinct > 1 and distinct > len(words) / 2:
            raise TableError(
                f"the target {self.target!r} has {distinct:,} classes in {len(words):,} rows; is it an identifier?"
            )
        return words


def encoder(schema: Schema) -> ColumnTransformer:
    """Numbers standardised, missing ones at the median and marked; a column for each frequent category, missing being one."""
    numbers = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
    categories = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=FEW, sparse_output=False)
    parts = [("numbers", numbers, schema.numbers), ("categories", categories, schema.categories)]
    return ColumnTransformer([part for part in parts if part[2]])


def unseen_categories(
    fitted: ColumnTransformer, schema: Schema, objects: pd.DataFrame
) -> dict[str, tuple[int, list[str]]]:
    """By column, how many rows hold categories that the encoder was not fitted on, and a few of these."""
    out: dict[str, tuple[int, list[str]]] = {}
    if not schema.categories:
        return out
    for name, known in zip(schema.categories, fitted.named_transformers_["categories"].categories_, strict=True):
        new = objects[name][~objects[name].isin(known.tolist())]
        if len(new):
            out[name] = len(new), [str(value) for value in new.unique()[:3]]
    return out


def check_name(frame: pd.DataFrame, name: str, option: str) -> None:
    """Raise where the table has no such column; say which one may have been meant."""
    if name in frame.columns:
        return
    close = difflib.get_close_matches(name.lower(), [column.lower() for column in frame.columns], n=1, cutoff=0.5)
    meant = next((column for column in frame.columns if close and column.lower() == close[0]), None)
    hint = f"did you mean {meant!r}?" if meant else f"the columns are {listed(list(frame.columns))}."
    raise TableError(f"{option} {name!r} is no column of the table; {hint}")


def no_categories(column: pd.Series) -> str:
    """What a column holds that is neither numbers nor categories; empty where it is either."""
    if types.is_datetime64_any_dtype(column) or types.is_timedelta64_dtype(column):
        return "dates"
    distinct = as_words(column).nunique()
    many = distinct > FEW and distinct > len(column) / 2
    if many and as_words(column).dropna().str.fullmatch(r"\s*[+-]?\d+,\d+\s*").all():
        return "numbers with commas in them (write points instead)"
    return f"{distinct:,} different texts in {len(column):,} rows" if many else ""


def strays(column: pd.Series) -> list[str]:
    """The words of a column that is numbers but for a few of its cells, such as "<5"; none of other columns."""
    given = column.dropna()
    bad = given[pd.to_numeric(given, errors="coerce").isna()]
    mostly = 0 < len(bad) <= len(given) / 20 and given.nunique() - bad.nunique() > SEVERAL
    return sorted(map(str, bad.unique())) if mostly else []


def is_number(column: pd.Series) -> bool:
    """Whether a column holds numbers; truth values are categories."""
    return bool(
        types.is_numeric_dtype(column) and not types.is_bool_dtype(column) and not types.is_complex_dtype(column)
    )


def is_row_number(column: pd.Series) -> bool:
    """Whether a column counts the rows, from any number: an identifier, or the nameless index that pandas writes."""
    return len(column) > SEVERAL and is_number(column) and bool((column.diff()[1:] == 1).all())


def as_numbers(column: pd.Series, name: str) -> pd.Series:
    """The column as float64, missing values as nan."""
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    odd = numbers.isna() & column.notna()
    if odd.any():
        raise TableError(
            f"the column {name!r} must hold numbers, and holds {str(column[odd].iloc[0])[:40]!r} in {int(odd.sum()):,} rows."
        )
    if np.isinf(numbers).any():
        raise TableError(f"the column {name!r} holds infinite numbers; leave them empty, or mend them.")
    if (far := numbers.abs() > LARGEST).any():
        raise TableError(
            f"the column {name!r} holds {numbers[far].iloc[0]:.3g}, too large to compute with; look for a wrong unit or a placeholder, "
            "and leave such numbers empty, or mend them."
        )
    return numbers


def stripped(column: pd.Series) -> pd.Series:
    """A column of labels without the spaces around them; those that are nothing else are missing."""
    if not types.is_object_dtype(column) and not types.is_string_dtype(column):
        return column
    words = column.map(lambda word: word.strip() if isinstance(word, str) else word, na_action="ignore")
    return words.mask(words == "")


def as_words(column: pd.Series) -> pd.Series:
    """The column as text, missing values as nan; truth values are written one way."""
    truth = {"true": "True", "false": "False"}
    words = [np.nan if pd.isna(value) else truth.get(str(value).lower(), str(value)) for value in column]
    return pd.Series(words, index=column.index, dtype=object)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in words, the first few of many."""
    few = ", ".join(repr(name) for name in names[:most])
    return few if len(names) <= most else f"{few} and {len(names) - most} more"


def quoted(name: str) -> str:
    """A name as one types it on the command line."""
    return name if name.isidentifier() else f"'{name}'"

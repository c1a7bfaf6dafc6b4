"""What the columns of a table hold: numbers, categories, the target; and their encoder for scikit-learn."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api import types

# A column may have this many different words however few its rows, and so many categories get a column of their own.
MAX_CATEGORIES = 100
# More different numbers than this are a quantity, or number the rows; fewer may be codes.
MAX_CODES = 10
# Words of a category that are saved with a predictor at most, so that it can tell new ones.
MAX_WORDS = 10_000
# What people write around the digits of a number.
MARKS = r"[$€£¥%,\s]"
# A number with leading zeros.
CODE = r"\s*0\d+\s*"
COMMA = r"\s*[+-]?\d+,\d+\s*"
DATES = "dates; write them as 2024-03-01, or as numbers"
# 2024-03-01, 2024/3/1, 1.3.2024, 3/1/24, 2024-03, 1 Mar 2024, March 1, 2024; with or without a time.
DATE = (
    r"\s*(?:\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/])\d{1,2}\2\d{2,4}|\d{1,2}\.\d{1,2}\.\d{4}|\d{4}-\d{2}"
    r"|\d{1,2}[ -][A-Za-z]{3,9}\.?[ -]\d{2,4}|[A-Za-z]{3,9}\.? \d{1,2},? \d{4})(?:[ T]\d{1,2}:\d{2}.*)?\s*"
)


# The year first, with or without a time.
PLAIN_DATE = r"\s*\d{4}-\d{2}-\d{2}(?:[ T]\d{2}:\d{2}.*)?\s*"


class TableError(ValueError):
    """A table cannot be read, or lacks something that is needed."""


@dataclass(frozen=True)
class Schema:
    """Which columns of a table are numbers, which are categories, and which one is the target."""

    target: str
    numbers: list[str]
    categories: list[str]
    left_out: list[str]
    # Those of the numbers that are written as dates.
    dates: list[str] = field(default_factory=list)
    # What stands for a missing value, besides empty cells and the like.
    missing: list[str] = field(default_factory=list)
    # The mark in numbers of text files, and what separates their columns; None for what the name of a file says.
    decimal: str = "."
    sep: str | None = None
    # By category, the words of the training table, "" where it is missing, unless they are too many.
    words: dict[str, list[str]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The columns that are used."""
        return [*self.numbers, *self.categories]

    @classmethod
    def of(
        cls,
        frame: pd.DataFrame,
        target: str,
        drop: Sequence[str] = (),
        categorical: Sequence[str] = (),
        missing: Sequence[str] = (),
        decimal: str = ".",
        sep: str | None = None,
    ) -> Schema:
        """The schema of a training table, or a `TableError` that names the columns that cannot be used."""
        for option, names in (("--target", [target]), ("--drop", drop), ("--categorical", categorical)):
            for name in names:
                check_name(frame, name, option)
        numbers, categories, dates, left_out, refused = [], [], [], list(dict.fromkeys(drop)), {}
        for name, column in frame.items():
            if name == target or name in drop:
                continue
            # It numbers the rows, from any start: an identifier, or the index that pandas writes.
            numbers_rows = len(column) > MAX_CODES and is_number(column) and bool((column.diff()[1:] == 1).all())
            if column.isna().all() or (numbers_rows and name not in categorical):
                left_out.append(str(name))
            elif name in categorical:
                categories.append(str(name))
            elif is_number(column):
                numbers.append(str(name))
            elif has_plain_dates(column):
                numbers.append(str(name))
                dates.append(str(name))
            elif kind := unusable(column):
                refused[str(name)] = kind
                if words := stray_words(column, decimal):
                    refused[str(name)] += f", numbers except for {remedy(words)}"
            else:
                categories.append(str(name))
        # All of them at once, so that one more try is enough.
        if refused:
            found = "; ".join(f"the column {name!r} holds {kind}" for name, kind in refused.items())
            options = " ".join(f"--drop {shlex.quote(name)}" for name in refused)
            options += " (or --categorical, if it stands for groups)" * any(kind == DATES for kind in refused.values())
            raise TableError(f"{found}. Leave out columns that are neither numbers nor categories: {options}")
        if not numbers and not categories:
            raise TableError(f"there is no column to predict from besides the target {target!r}.")
        known = {name: sorted(as_words(frame[name]).fillna("").unique().tolist()) for name in categories}
        known = {name: each for name, each in known.items() if len(each) <= MAX_WORDS}
        return cls(target, numbers, categories, left_out, dates, list(missing), decimal, sep, known)

    @classmethod
    def of_json(cls, values: Any) -> Schema:
        """A schema from its JSON."""
        if isinstance(values, dict) and set(values) == set(cls.__dataclass_fields__):
            texts = [values["target"], values["decimal"], "" if values["sep"] is None else values["sep"]]
            words = values["words"] if isinstance(values["words"], dict) else {"": None}
            known = ("target", "decimal", "sep", "words")
            lists = [*(value for name, value in values.items() if name not in known), *words.values(), list(words)]
            if all(isinstance(value, list) for value in lists):
                texts += [text for value in lists for text in value]
                used = [*values["numbers"], *values["categories"]]
                if all(isinstance(text, str) for text in texts) and len(set(used)) == len(used):
                    return cls(**values)
        raise TableError("the description of the table's columns is missing or invalid.")

    def objects(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The columns that are used, numbers as float64 and categories as text; others are ignored, in any order."""
        absent = [name for name in self.columns if name not in frame.columns]
        if absent:
            raise TableError(
                f"the table lacks the column{'s' * (len(absent) > 1)} {listed(absent)}, which the predictor was fitted on; "
                "add what is lacking, with empty cells where it is not known, or fit without it (--drop)."
            )
        days = {name: as_days(frame[name], name) for name in self.numbers if name in self.dates}
        out: dict[str, Any] = {name: as_numbers(days.get(name, frame[name]), name) for name in self.numbers}
        out |= {name: as_words(frame[name]) for name in self.categories}
        return pd.DataFrame(out, columns=self.columns)

    def unseen(self, objects: pd.DataFrame) -> dict[str, tuple[int, list[str]]]:
        """By column, the number of rows whose category the training table lacks, and a few of these categories."""
        new = {name: objects[name].fillna("") for name in self.words if name in self.categories}
        new = {name: column[~column.isin(self.words[name])] for name, column in new.items()}
        few = {name: [word or "missing" for word in column.unique()[:3]] for name, column in new.items()}
        return {name: (len(column), few[name]) for name, column in new.items() if len(column)}

    def complete(self, frame: pd.DataFrame) -> pd.Series:
        """The target (n,), which must not be missing."""
        column = frame[self.target]
        missing = int(column.isna().sum())
        if missing:
            raise TableError(
                f"the target {self.target!r} is missing in {missing:,} of {len(column):,} rows; leave these rows out "
                "(--drop-missing)."
            )
        return column

    def quantities(self, frame: pd.DataFrame) -> npt.NDArray[np.float64]:
        """The target (n,) as numbers."""
        return np.asarray(as_numbers(self.complete(frame), self.target), dtype=np.float64)

    def labels(self, frame: pd.DataFrame) -> Any:
        """The target (n,) as classes."""
        column = self.complete(frame)
        if is_number(column):
            if is_quantity(column):
                raise TableError(
                    f"the target {self.target!r} holds {column.nunique():,} different numbers: it is a quantity, not classes. Predict it "
                    "as one (--task regression), or cut the numbers into a few intervals."
                )
            return column.to_numpy().astype(np.int64)
        words = as_words(column).to_numpy(dtype=str)
        distinct = len(np.unique(words))
        if distinct > 1 and distinct > len(words) / 2:
            raise TableError(
                f"the target {self.target!r} has {distinct:,} classes in {len(words):,} rows; is it an identifier?"
            )
        return words


def encoder(schema: Schema) -> Any:
    """Standardise numbers, fill in and mark missing ones; give each frequent category a column, missing values too."""
    # Here, so that --help and errors in the table do not wait for scikit-learn.
    from sklearn.compose import ColumnTransformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    from fullconformal.models import RoundedImputer

    numbers = make_pipeline(RoundedImputer(strategy="median", add_indicator=True), StandardScaler())
    categories = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=MAX_CATEGORIES, sparse_output=False)
    parts = [("numbers", numbers, schema.numbers), ("categories", categories, schema.categories)]
    return ColumnTransformer([part for part in parts if part[2]])


def check_name(frame: pd.DataFrame, name: str, option: str) -> None:
    """Raise if the table has no such column, and suggest the closest name."""
    if name in frame.columns:
        return
    by_lower = {column.lower(): column for column in reversed(frame.columns)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[close[0]]!r}?" if close else f"the columns are {listed(list(frame.columns))}."
    raise TableError(f"{option} {name!r} is not a column of the table; {hint}")


def has_plain_dates(column: pd.Series) -> bool:
    """Whether a column holds dates that can be read in one way: years first, or as a file of another kind than text has them."""
    if types.is_datetime64_any_dtype(column):
        return True
    given = as_words(column).dropna()
    return bool(
        given.str.fullmatch(PLAIN_DATE).all() and pd.to_datetime(given, errors="coerce", utc=True).notna().all()
    )


def as_days(column: pd.Series, name: str) -> pd.Series:
    """Dates as days since 1970, missing ones as NaN."""
    given = column if types.is_datetime64_any_dtype(column) else as_words(column)
    days = pd.to_datetime(given, errors="coerce", utc=True, format="ISO8601")
    odd = days.isna() & column.notna()
    if odd.any():
        raise TableError(
            f"the column {name!r} must hold dates such as 2024-03-01, but holds {str(column[odd].iloc[0])[:40]!r} in "
            f"{int(odd.sum()):,} rows."
        )
    return (days - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)


def unusable(column: pd.Series) -> str:
    """What a column holds that is neither numbers nor categories; empty if it can be used."""
    if types.is_timedelta64_dtype(column):
        return "durations; write them as numbers"
    words = as_words(column)
    given = words.dropna()
    # However often they repeat: as categories, later dates would all be unseen ones.
    if given.str.fullmatch(DATE).sum() > 0.9 * len(given):
        return DATES
    distinct = words.nunique()
    if distinct <= max(MAX_CATEGORIES, len(column) / 2):
        return ""
    if given.str.fullmatch(COMMA).all():
        return "numbers with decimal commas (use points instead)"
    return f"{distinct:,} different texts in {len(column):,} rows"


def stray_words(column: pd.Series, decimal: str = ".") -> list[str]:
    """What a column holds that is otherwise a quantity, such as "<5", "unknown" or "$1,234"; empty for other columns.

    A quantity has more than a few different numbers, marks of money, percent and thousands left aside, and words in one cell of twenty
    at most, or no more than three of them: placeholders.
    """
    given = as_words(column).dropna()
    odd = given[pd.to_numeric(given.str.replace(decimal, ".", regex=False), errors="coerce").isna()]
    marked = pd.to_numeric(odd.str.replace(MARKS, "", regex=True), errors="coerce").notna()
    words = odd[~marked]
    numbers = given.nunique() - words.nunique()
    quantity = numbers > MAX_CODES and (len(words) <= len(given) / 20 or words.nunique() <= 3)
    return [*sorted(words.unique()), *sorted(odd[marked].unique())] if quantity else []


def variants(column: pd.Series) -> list[str]:
    """The words of a column that differ from another one in capitals or the spaces around them alone."""
    words = as_words(pd.Series(column.unique())).dropna()
    return sorted(
        words[words.str.strip().str.casefold().duplicated(keep=False)], key=lambda word: (word.casefold(), word)
    )


def remedy(words: Sequence[str]) -> str:
    """Some of the words in a column of numbers, and what to do about them."""
    few = listed(words, most=3)
    absent = [word for word in words if not any(letter.isdigit() for letter in word)]
    options = " ".join(f"--missing {shlex.quote(word)}" for word in absent[:3])
    told = f"{options} reads {'it' if len(absent) == 1 else 'them'} as missing" if options else ""
    commas = [word for word in words if re.fullmatch(COMMA, word)]
    # Three digits behind each comma are as well thousands.
    if len(commas) + len(absent) == len(words) and any(len(word) - word.index(",") != 4 for word in commas):
        plain = "--decimal , reads decimal commas"
    else:
        plain = "write plain numbers there" if len(absent) < len(words) else ""
    return f"{few}: {', '.join(filter(None, [told, plain]))} if it is a quantity"


def is_number(column: pd.Series) -> bool:
    """Whether a column holds numbers; booleans are categories."""
    return bool(
        types.is_numeric_dtype(column) and not types.is_bool_dtype(column) and not types.is_complex_dtype(column)
    )


def is_quantity(column: pd.Series) -> bool:
    """Whether a column of numbers, none missing, is a quantity: not whole, or of too many different values for classes."""
    values = column.to_numpy()
    whole = bool(np.isfinite(values).all() and (values == np.floor(values)).all())
    return not whole or column.nunique() > max(MAX_CATEGORIES, len(values) / 20)


def as_numbers(column: pd.Series, name: str) -> pd.Series:
    """The column as float64, missing values as NaN."""
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    odd = numbers.isna() & column.notna()
    if odd.any():
        # One text among numbers with decimal commas makes all of them texts.
        worst = min(as_words(column[odd]), key=lambda word: bool(re.fullmatch(COMMA, word)))
        raise TableError(
            f"the column {name!r} must hold numbers, but holds texts in {int(odd.sum()):,} rows, such as {worst[:40]!r}; write "
            "plain numbers there, such as 1234.5 (--decimal , reads 1234,5; --missing TEXT reads a text as missing)."
        )
    if np.isinf(numbers).any():
        raise TableError(f"the column {name!r} holds infinite numbers; correct or clear these cells.")
    # The squares of larger numbers, or sums of many squares, would be infinite.
    if (large := numbers.abs() > 1e150).any():
        raise TableError(
            f"the column {name!r} holds {numbers[large].iloc[0]:.3g}, which is too large to compute with; look for a wrong unit or a "
            "placeholder, and correct or clear these cells."
        )
    return numbers


def stripped(column: pd.Series) -> pd.Series:
    """A column of labels without the spaces around them; labels of spaces only are missing."""
    if not types.is_object_dtype(column) and not types.is_string_dtype(column):
        return column
    words = column.map(lambda word: word.strip() if isinstance(word, str) else word, na_action="ignore")
    return words.mask(words == "")


def as_words(column: pd.Series) -> pd.Series:
    """The column as text, missing values as NaN; booleans are always written True and False."""
    booleans = {"true": "True", "false": "False"}
    words = [np.nan if pd.isna(value) else booleans.get(str(value).lower(), str(value)) for value in column]
    return pd.Series(words, index=column.index, dtype=object)


def listed(names: Sequence[str], most: int = 8, show: Callable[[str], str] = repr) -> str:
    """Names separated by commas; if there are many, the first ones and the number of the others."""
    few = ", ".join(map(show, names[:most]))
    return few if len(names) <= most else f"{few} and {len(names) - most} more"

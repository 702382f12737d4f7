"""What the seed script of a database may do.

No script attaches a database, calls a function that loads code or touches files, or changes a setting that the whole
process shares. A script in a file is its author's; one in the configuration (`seed_sql`) may come from a dataset's row,
so it is data: it sets only the pragmas that dumps need, makes no virtual tables and does not write the schema directly,
since both can make a damaged database.
"""

from __future__ import annotations

import sqlite3
from typing import Literal

SeedSource = Literal["data", "file"]

DANGEROUS_FUNCTIONS = frozenset(
    {"load_extension", "readfile", "writefile", "edit", "lsmode", "fsdir", "zipfile", "fts3_tokenizer"}
)
"""They load code, touch files or take addresses (`fts3_tokenizer`); not even our own statements may call them."""

_PRAGMAS_OF_THE_PROCESS = frozenset(
    {"hard_heap_limit", "soft_heap_limit", "temp_store_directory", "data_store_directory"}
)
_PRAGMAS_OF_DATA = frozenset(
    {
        "application_id",
        "auto_vacuum",
        "cache_size",
        "case_sensitive_like",
        "collation_list",
        "defer_foreign_keys",
        "encoding",
        "foreign_key_check",
        "foreign_key_list",
        "foreign_keys",
        "ignore_check_constraints",
        "index_info",
        "index_list",
        "index_xinfo",
        "integrity_check",
        "journal_mode",
        "legacy_alter_table",
        "locking_mode",
        "page_size",
        "quick_check",
        "recursive_triggers",
        "reverse_unordered_selects",
        "secure_delete",
        "synchronous",
        "table_info",
        "table_list",
        "table_xinfo",
        "temp_store",
        "user_version",
    }
)


def attaches(action: int) -> bool:
    """Whether an action, as an authorizer is asked, attaches or detaches a database; VACUUM INTO does too."""
    return action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)


def seed_problem(source: SeedSource, action: int, first: str, second: str) -> str:
    """Why an action of a seed script is refused; "" if it is allowed.

    Args:
        source: "file" if the task's author wrote the script, "data" if a row may have.
        action: as an authorizer is asked, with its first two arguments.
        first: of these, in lower case.
        second: likewise.
    """
    if attaches(action):
        return "ATTACH, DETACH and VACUUM are refused: there is only this database"
    if action == sqlite3.SQLITE_FUNCTION and second in DANGEROUS_FUNCTIONS:
        return f"the function {second}() is refused"
    if action == sqlite3.SQLITE_PRAGMA:
        is_refused = first in _PRAGMAS_OF_THE_PROCESS if source == "file" else first not in _PRAGMAS_OF_DATA
        return f"PRAGMA {first} is refused" if is_refused else ""
    if action == sqlite3.SQLITE_CREATE_VTABLE and source == "data":
        return "virtual tables are refused here; put the script into a file and name it with seed_sql_file"
    return ""

"""Test the SQL resource: statements are confined to its own database and limited in time and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reward_kit.environments import SqliteResource, open_snapshot
from reward_kit.environments.sqlite import split_statements
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError

SEED = """
PRAGMA foreign_keys = ON;
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer REFERENCES customers (id), total REAL DEFAULT 0);
INSERT INTO customers (name) VALUES ('Ada'), ('Bob');
INSERT INTO orders (customer, total) VALUES (1, 2.5), (2, 4);
"""
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


async def made(**config) -> SqliteResource:
    resource = SqliteResource()
    await resource.setup({"seed_sql": SEED, **config})
    await resource.reset(0)
    return resource


@pytest.fixture
async def resource():
    resource = await made(statement_time_s=0.3, max_rows=3, max_database_bytes=500_000)
    yield resource
    await resource.close()


async def sql(resource, query):
    return (await resource.step("execute_sql", {"query": query})).observation


async def test_initial_observation_is_the_schema(resource) -> None:
    text = await resource.get_observation()
    assert "CREATE TABLE customers" in text
    assert "INSERT" not in text


async def test_query_returns_columns_and_rows(resource) -> None:
    assert await sql(resource, "SELECT id, name FROM customers") == {
        "columns": ["id", "name"],
        "rows": [[1, "Ada"], [2, "Bob"]],
    }


async def test_long_result_is_cut_with_a_notice(resource) -> None:
    result = await sql(resource, "VALUES (1), (2), (3), (4)")
    assert len(result["rows"]) == 3
    assert result["cut"] == "only the first 3 rows are shown; there are more"
    assert "cut" not in await sql(resource, "VALUES (1), (2), (3)")


async def test_values_without_json_form_are_shown_as_text(resource) -> None:
    result = await sql(resource, "SELECT 9e999, x'00ff', CAST(x'ff' AS TEXT), NULL")
    assert result["rows"] == [["inf", "x'00ff'", "\ufffd", None]]


async def test_write_returns_the_number_of_changed_rows(resource) -> None:
    assert await sql(resource, "UPDATE orders SET total = 0") == {"changed_rows": 2}
    result = await sql(resource, "INSERT INTO customers (name) VALUES ('Eve') RETURNING id")
    assert result == {"columns": ["id"], "rows": [[3]], "changed_rows": 1}


async def test_script_returns_the_rows_of_its_last_query(resource) -> None:
    result = await sql(
        resource, "INSERT INTO customers (name) VALUES (';'); SELECT count(*) AS n FROM customers; -- end"
    )
    assert result == {"columns": ["n"], "rows": [[3]], "changed_rows": 1}


async def test_query_of_a_tool_binds_values_and_returns_all_rows(resource) -> None:
    hostile = "'); DROP TABLE customers; --"
    before = await resource.state_key()
    assert await resource.query("INSERT INTO customers (id, name) VALUES (?, ?)", 90, hostile) == []
    assert await resource.query("SELECT name FROM customers WHERE id = ?", 90) == [(hostile,)]
    assert (
        len(await resource.query("WITH RECURSIVE n(x) AS (SELECT 1 UNION SELECT x + 1 FROM n LIMIT 9) SELECT x FROM n"))
        == 9
    )
    after = await resource.state_key()
    assert after != before
    for statement, message in (
        ("SELECT * FROM orders_of", "no such table: orders_of, in the statement 'SELECT"),
        ("SELECT id FROM customers WHERE id = ?", "Incorrect number of bindings"),
        ("ATTACH DATABASE 'x' AS y", "ATTACH and VACUUM INTO are not allowed"),
    ):
        with pytest.raises(ValueError, match=message):
            await resource.query(statement)
    for value, message in ((90, "UNIQUE constraint failed"), (1 << 80, "too large"), ("x" * 2_000_000, "larger than")):
        with pytest.raises(ToolError, match=message):
            await resource.query("INSERT INTO customers (id, name) VALUES (?, 'b')", value)
    assert await resource.state_key() == after


async def test_tables_can_be_listed_and_described(resource) -> None:
    await sql(resource, "CREATE VIEW rich AS SELECT * FROM orders WHERE total > 3")
    listed = (await resource.step("list_tables", {})).observation
    assert listed == [
        {"name": "customers", "type": "table"},
        {"name": "orders", "type": "table"},
        {"name": "rich", "type": "view"},
    ]
    described = (await resource.step("describe_table", {"name": "Orders"})).observation
    assert [column["name"] for column in described["columns"]] == ["id", "customer", "total"]
    assert described["foreign_keys"] == [{"column": "customer", "table": "customers", "references": "id"}]


def test_script_is_split_only_at_top_level_semicolons() -> None:
    trigger = "CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; SELECT ';'; END;"
    script = f"-- a; comment\nSELECT ';' ; /* ; */ {trigger} ; ; SELECT \"x;y\""
    statements = split_statements(script)
    assert len(statements) == 3
    assert statements[1].endswith(trigger)


ESCAPES = [
    ("ATTACH DATABASE '{file}' AS other", "the only database"),
    ("ATTACH ':memory:' AS other", "the only database"),
    ("DETACH main", "the only database"),
    ("VACUUM INTO '{file}'", "VACUUM"),
    ("SELECT load_extension('{file}')", r"load_extension\(\) is not allowed"),
    ("SELECT readfile('/etc/passwd')", "readfile"),
    ("SELECT writefile('{file}', 'x')", "writefile"),
    ("SELECT fts3_tokenizer('simple')", "not allowed"),
    ("CREATE VIRTUAL TABLE v USING fts5 (a)", "virtual tables are not allowed"),
    ("CREATE TEMP TABLE t (a)", r"CREATE TEMP TABLE"),
    ("SELECT * FROM dbstat", "dbstat is not allowed"),
    ("PRAGMA journal_mode = DELETE", "PRAGMA journal_mode is not allowed"),
    ("PRAGMA temp_store_directory = '/tmp'", "is not allowed"),
    ("PRAGMA writable_schema = ON", "is not allowed"),
    ("PRAGMA foreign_keys = OFF", "is not allowed"),
    ("SELECT * FROM pragma_database_list", "database_list is not allowed"),
    ("UPDATE sqlite_master SET sql = ''", "may not be modified"),
    ("BEGIN", "completely or not at all"),
    ("COMMIT", "completely or not at all"),
    ("ROLLBACK", "completely or not at all"),
    ("SAVEPOINT tool_call", "savepoints are not allowed"),
    ("RELEASE tool_call", "savepoints are not allowed"),
    ("ROLLBACK TO tool_call", "savepoints are not allowed"),
    ("ANALYZE", "ANALYZE"),
    ("SELECT last_insert_rowid()", "use RETURNING"),
    ("SELECT total_changes()", "is not allowed|no such|total_changes"),
    ("SELECT datetime('now', 'localtime')", "all times are UTC"),
]


@pytest.mark.parametrize(("query", "message"), ESCAPES)
async def test_statements_that_leave_the_database_are_rejected(resource, tmp_path, query, message) -> None:
    before, file = await resource.state_key(), tmp_path / "other.db"
    with pytest.raises(ToolError, match=message):
        await sql(resource, query.format(file=file))
    assert not file.exists()
    assert await resource.state_key() == before
    assert (await sql(resource, "SELECT count(*) FROM customers"))["rows"] == [[2]]


@pytest.mark.parametrize(
    "query",
    [
        ENDLESS,
        f"INSERT INTO customers (name) VALUES ('x'); {ENDLESS}",
        f"CREATE TABLE t (a); INSERT INTO t {ENDLESS}",
        ENDLESS.replace("count(*)", "hex(zeroblob(9999)), x") + " ORDER BY 2 DESC",
    ],
)
async def test_endless_statement_times_out_without_changes(resource, query) -> None:
    before = await resource.state_key()
    with pytest.raises(ToolError, match=r"took longer than 0\.3 s"):
        await sql(resource, query)
    assert await resource.state_key() == before
    assert (await sql(resource, "SELECT 1"))["rows"] == [[1]]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT zeroblob(1000000000)",
        "SELECT length(randomblob(1000000000))",
        "SELECT hex(zeroblob(200000))",
        "SELECT replace(hex(zeroblob(100000)), '0', 'aaaaaaaa')",
        "SELECT group_concat(hex(zeroblob(100000))) FROM (VALUES (1), (2), (3))",
    ],
)
async def test_huge_values_are_rejected(resource, query) -> None:
    with pytest.raises(ToolError, match=r"larger than 262144 bytes"):
        await sql(resource, query)


async def test_huge_printf_width_returns_null(resource) -> None:
    assert (await sql(resource, "SELECT printf('%1000000000d', 1)"))["rows"] == [[None]]


async def test_database_cannot_grow_beyond_its_limit(resource) -> None:
    before = await resource.state_key()
    bomb = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) INSERT INTO customers (name) "
    with pytest.raises(ToolError, match="larger than 500000 bytes"):
        await sql(resource, bomb + "SELECT hex(zeroblob(10000)) FROM c")
    assert await resource.state_key() == before
    fork = await resource.fork()
    with pytest.raises(ToolError, match="larger than 500000 bytes"):
        await sql(fork, bomb + "SELECT hex(zeroblob(10000)) FROM c")
    await fork.close()


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("INSERT INTO customers (name) VALUES ('x'); INSERT INTO nowhere VALUES (1)", "no such table"),
        ("INSERT INTO customers (name) VALUES ('x'); INSERT OR ROLLBACK INTO customers VALUES (1, 'y')", "UNIQUE"),
        ("INSERT INTO orders (customer) VALUES (99)", "FOREIGN KEY"),
        ("SELECT fullness, too_big FROM customers", "no such column: fullness"),
        ("SELECT ?", "bindings"),
        ("SELECT 'a", "unrecognized token"),
        ("-- nothing", "no statement"),
        ("SELECT 1;" * 101, "more than 100 statements"),
        ("SELECT '" + "x" * 60_000 + "'", "longer than 50000"),
        ("SELECT '\0'", "NUL"),
        ("SELECT '\ud800'", "Unicode"),
    ],
)
async def test_failed_call_is_rolled_back_as_a_whole(resource, query, message) -> None:
    before = await resource.state_key()
    with pytest.raises(ToolError, match=message):
        await sql(resource, query)
    assert await resource.state_key() == before


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("fetch_val_sql", {"query": "SELECT 1"}, "unknown tool 'fetch_val_sql'"),
        ("execute_sql", {}, "query: missing"),
        ("execute_sql", {"sql": "SELECT 1"}, "unknown argument 'sql'"),
        ("execute_sql", {"query": 1}, "must be a string"),
        ("list_tables", {"x": 1}, "unknown argument"),
        ("describe_table", {"name": "order"}, "did you mean 'orders'"),
    ],
)
async def test_invalid_call_is_rejected(resource, tool, arguments, message) -> None:
    with pytest.raises(ToolError, match=message):
        await resource.step(tool, arguments)


async def test_read_only_database_cannot_be_changed() -> None:
    resource = await made(read_only=True)
    for query in ("DELETE FROM orders", "CREATE TABLE t (a)", "DROP TABLE orders"):
        with pytest.raises(ToolError, match="read-only"):
            await sql(resource, query)
    assert (await sql(resource, "SELECT count(*) FROM orders"))["rows"] == [[2]]
    await resource.close()


async def test_current_time_is_fixed(resource) -> None:
    result = await sql(
        resource, "SELECT datetime('now'), date(), CURRENT_TIMESTAMP, strftime('%Y'), date('now', '+1 day')"
    )
    assert result["rows"] == [["2025-01-01 00:00:00", "2025-01-01", "2025-01-01 00:00:00", "2025", "2025-01-02"]]
    other = await made(now="1999-12-31 23:59:59")
    assert (await sql(other, "SELECT CURRENT_DATE"))["rows"] == [["1999-12-31"]]
    await other.close()


async def test_random_depends_only_on_the_seed(resource) -> None:
    query = "SELECT random(), hex(randomblob(4)), random()"
    first = await sql(resource, query)
    await sql(resource, "SELECT random()")
    fork = await resource.fork()
    assert await sql(resource, query) == await sql(fork, query) == first
    assert first["rows"][0][0] != first["rows"][0][2]
    await fork.reseed_noise(7)
    assert await sql(fork, query) != first
    assert await fork.state_key() == await resource.state_key()
    await fork.close()


async def test_resources_of_one_configuration_are_independent() -> None:
    # In the predecessor, two tasks with the same db_name overwrote each other's database.
    one, two = await made(), await made()
    await sql(one, "DROP TABLE orders")
    assert (await sql(two, "SELECT count(*) FROM orders"))["rows"] == [[2]]
    await one.close()
    await two.close()


async def test_fork_is_equal_independent_and_guarded(resource, tmp_path) -> None:
    await sql(resource, "INSERT INTO customers (name) VALUES ('Eve')")
    fork = await resource.fork()
    key = await resource.state_key()
    assert await fork.state_key() == key
    await sql(fork, "DELETE FROM orders")
    assert await resource.state_key() == key
    await sql(resource, "DELETE FROM customers WHERE name = 'Eve'")
    assert (await sql(fork, "SELECT count(*) FROM customers"))["rows"] == [[3]]
    with pytest.raises(ToolError, match="the only database"):
        await sql(fork, f"ATTACH '{tmp_path / 'x.db'}' AS x")
    with pytest.raises(ToolError, match="FOREIGN KEY"):
        await sql(fork, "INSERT INTO orders (customer) VALUES (99)")
    with pytest.raises(ToolError, match="took longer"):
        await sql(fork, ENDLESS)
    await fork.close()


async def test_checkpoint_restore_and_reset_keep_the_state(resource) -> None:
    first = await resource.state_key()
    await sql(resource, "DELETE FROM orders")
    saved, key = await resource.checkpoint(), await resource.state_key()
    await sql(resource, "DROP TABLE orders")
    await resource.restore(saved)
    assert await resource.state_key() == key
    await sql(resource, "DROP TABLE orders")
    await resource.restore(saved)
    assert await resource.state_key() == key
    with pytest.raises(ToolError, match="FOREIGN KEY"):
        await sql(resource, "INSERT INTO orders (customer) VALUES (99)")
    await resource.reset(0)
    assert await resource.state_key() == first


async def test_state_key_covers_schema_rows_and_types_only(resource) -> None:
    first, keys = await resource.state_key(), []
    for query in (
        "UPDATE customers SET name = 'Adam' WHERE id = 1",
        "CREATE INDEX by_name ON customers (name)",
        "CREATE TABLE plain (a, b)",
        "INSERT INTO plain VALUES ('61', 1)",
        "UPDATE plain SET a = x'3631'",
        "UPDATE plain SET a = 61",
        "CREATE TABLE keyed (k TEXT PRIMARY KEY, rowid, _rowid_, oid) WITHOUT ROWID",
        "INSERT INTO keyed VALUES ('k', 1, 2, 3)",
    ):
        await sql(resource, query)
        keys.append(await resource.state_key())
    await sql(
        resource,
        "DROP TABLE keyed; DROP TABLE plain; DROP INDEX by_name; UPDATE customers SET name = 'Ada' WHERE id = 1",
    )
    assert await resource.state_key() == first


async def test_trigger_changes_are_visible(resource) -> None:
    await sql(
        resource,
        "CREATE TRIGGER log AFTER INSERT ON orders BEGIN UPDATE customers SET name = name || '!'; END;"
        "INSERT INTO orders (customer) VALUES (1)",
    )
    assert (await sql(resource, "SELECT name FROM customers"))["rows"] == [["Ada!"], ["Bob!"]]


async def test_equal_histories_leave_equal_bytes() -> None:
    one, two = await made(), await made()
    for resource in (one, two):
        await sql(resource, "INSERT INTO orders (customer, total) VALUES (1, random() % 100)")
        with pytest.raises(ToolError):
            await sql(resource, "DELETE FROM orders; SELECT nothing")
        await sql(resource, "DELETE FROM orders WHERE id = 1")
    assert (await one.final_state()).payload == (await two.final_state()).payload
    await one.close()
    await two.close()


async def test_final_state_can_be_queried_after_close() -> None:
    resource = await made()
    await sql(resource, "UPDATE orders SET total = 10")
    snapshot = await resource.final_state()
    await resource.close()
    await resource.close()
    with open_snapshot(snapshot) as state:
        assert state.query("SELECT sum(total) FROM orders WHERE total > ?", 5) == [(20.0,)]
        assert state.tables() == ["customers", "orders"]
    with pytest.raises(EnvironmentFailure, match="closed"):
        await resource.state_key()


async def test_seed_file_must_be_in_the_task_folder(tmp_path) -> None:
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "seed.sql").write_text(SEED)
    (tmp_path / "outside.sql").write_text(SEED)
    resource = SqliteResource()
    await resource.setup({"seed_sql_file": "seed.sql", "task_folder": str(folder)})
    assert (await sql(resource, "SELECT count(*) FROM orders"))["rows"] == [[2]]
    await resource.close()
    (folder / "link.sql").symlink_to(tmp_path / "outside.sql")
    for path in ("../outside.sql", str(tmp_path / "outside.sql"), "link.sql"):
        with pytest.raises(ConfigError, match="outside the task's directory"):
            await SqliteResource().setup({"seed_sql_file": path, "task_folder": str(folder)})


async def test_seed_cannot_attach_other_files(tmp_path) -> None:
    file = tmp_path / "other.db"
    for script in (f"ATTACH '{file}' AS other", f"CREATE TABLE t (x); VACUUM INTO '{file}'"):
        with pytest.raises(ConfigError, match="seed_sql: ATTACH, DETACH and VACUUM are not allowed"):
            await made(seed_sql=script)
    assert not file.exists()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        # Debian's SQLite lets SQL register a tokenizer by its address, which is a call of any address in the process.
        ("SELECT fts3_tokenizer('t', x'4141414141414141'); CREATE VIRTUAL TABLE f USING fts3(a, tokenize=t)", "fts3_t"),
        ("SELECT load_extension('evil')", "load_extension"),
        ("PRAGMA hard_heap_limit = 1000", "PRAGMA hard_heap_limit"),
        ("PRAGMA temp_store_directory = '/tmp'", "PRAGMA temp_store_directory"),
    ],
)
async def test_seed_cannot_load_code_or_change_the_process(script: str, problem: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=rf"seed_sql: .*{problem}\w*(\(\))? is not allowed"):
        await made(seed_sql=script)
    (tmp_path / "seed.sql").write_text(script)
    with pytest.raises(ConfigError, match=rf"seed_sql_file 'seed.sql': .*{problem}\w*(\(\))? is not allowed"):
        await SqliteResource().setup({"seed_sql_file": "seed.sql", "task_folder": str(tmp_path)})


async def test_only_seed_files_may_create_virtual_tables_and_write_the_schema(tmp_path) -> None:
    for script in ("CREATE VIRTUAL TABLE f USING fts5 (a)", "PRAGMA writable_schema = ON"):
        with pytest.raises(ConfigError, match=r"seed_sql: .* not allowed"):
            await made(seed_sql=script)
        (tmp_path / "seed.sql").write_text(script)
        resource = SqliteResource()
        await resource.setup({"seed_sql_file": "seed.sql", "task_folder": str(tmp_path)})
        await resource.close()


async def test_seed_may_contain_settings_of_dumps() -> None:
    dump = "PRAGMA foreign_keys=OFF; PRAGMA journal_mode=MEMORY; BEGIN TRANSACTION; CREATE TABLE t (a); "
    resource = await made(seed_sql=f"{dump} INSERT INTO t VALUES (last_insert_rowid()); COMMIT; PRAGMA user_version=3;")
    assert (await sql(resource, "PRAGMA user_version"))["rows"] == [[3]]
    await resource.close()


async def test_seed_may_be_a_long_dump() -> None:
    rows = ", ".join(f"({number}, '{'x' * 20}')" for number in range(20_000))
    resource = await made(seed_sql=f"CREATE TABLE t (a, b); INSERT INTO t VALUES {rows};")
    assert (await sql(resource, "SELECT count(*) FROM t"))["rows"] == [[20_000]]
    await resource.close()


@pytest.mark.parametrize(
    "seed", ["", "PRAGMA page_size = 512; CREATE TABLE t (a);", "PRAGMA encoding = 'UTF-16le'; " + SEED]
)
async def test_unusual_databases_can_be_forked_and_reset(seed) -> None:
    resource = await made(seed_sql=seed)
    fork = await resource.fork()
    await sql(fork, "CREATE TABLE u (a); INSERT INTO u VALUES ('é')")
    await resource.reset(1)
    assert (await sql(fork, "SELECT a FROM u"))["rows"] == [["é"]]
    await resource.close()
    await fork.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seed_sql_fil": "x"}, "did you mean 'seed_sql_file'"),
        ({"seed_sql": "CREATE TABEL t (a)"}, "syntax error"),
        ({"seed_sql_file": "no such file.sql"}, "cannot be read"),
        ({"seed_sql": "", "seed_sql_file": "x"}, "set either seed_sql or seed_sql_file"),
        ({"now": "today"}, "YYYY-MM-DD"),
        ({"max_rows": 0}, "max_rows"),
        ({"db_name": "shared"}, "db_name: unknown key"),
    ],
)
async def test_invalid_configuration_is_one_clear_error(config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await SqliteResource().setup(config)


async def test_internal_statements_are_rejected_after_use(resource) -> None:
    for _ in range(3):
        await sql(resource, "SELECT 1")
        for query in ("SAVEPOINT tool_call", "RELEASE tool_call", "PRAGMA schema_version"):
            with pytest.raises(ToolError, match="not allowed"):
                await sql(resource, query)


def test_statement_that_exhausts_memory_while_parsing_is_rejected() -> None:
    # In a process of its own, with a lower limit than ours, because the limit is the process's.
    code = """
import asyncio, sqlite3
from reward_kit.environments import SqliteResource
from reward_kit.errors import ToolError

async def main():
    sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit = 30000000")
    resource = SqliteResource()
    await resource.setup({"seed_sql": "CREATE TABLE t (x)"})
    chain = ", ".join(f"c{n + 1} AS (SELECT x + x AS x FROM c{n})" for n in range(40))
    try:
        await resource.step("execute_sql", {"query": f"WITH c0 AS (SELECT x FROM t), {chain} SELECT x FROM c40"})
    except ToolError as error:
        print(error)
    print((await resource.step("execute_sql", {"query": "SELECT 1"})).observation["rows"])

asyncio.run(main())
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "the statement needs too much memory; nothing was changed\n[[1]]\n"


async def test_expert_executes_the_configured_queries_in_order() -> None:
    resource = SqliteResource()
    queries = ["INSERT INTO t VALUES (1)", "INSERT INTO t VALUES (2)"]
    await resource.setup({"seed_sql": "CREATE TABLE t (x);", "expert_queries": queries})
    await resource.reset(0)
    twin = None
    for query in queries:
        action = await resource.expert_action()
        assert action is not None and action["arguments"] == {"query": query}
        await resource.step("execute_sql", {"query": "SELECT * FROM t"})
        assert await resource.expert_action() == action
        await resource.step("execute_sql", {"query": query})
        twin = twin or await resource.fork()
    assert await resource.expert_action() is None
    assert twin is not None and await twin.expert_action() is not None
    await resource.reset(0)
    first = await resource.expert_action()
    assert first is not None and first["arguments"] == {"query": queries[0]}
    await resource.close()
    await twin.close()

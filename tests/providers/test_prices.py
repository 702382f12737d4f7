"""Price tables and the cost of a completion."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.errors import ConfigError
from reward_kit.providers import Price, PriceTable, load_prices

COUNTS = st.integers(0, 10**7)


def test_yaml_and_json_price_files_are_equivalent(tmp_path):
    prices = {"small": {"input": 0.4, "output": 1.6, "cached": 0.1}, "free": {"input": 0, "output": 0}}
    as_json, as_yaml = tmp_path / "p.json", tmp_path / "p.yaml"
    as_json.write_text(json.dumps(prices))
    as_yaml.write_text("small: {input: 0.4, output: 1.6, cached: 0.1}\nfree: {input: 0, output: 0}\n")
    assert load_prices(as_json) == load_prices(as_yaml)
    assert load_prices(str(as_json)).models == {"small": Price(0.4, 1.6, 0.1, 0.4), "free": Price(0, 0, 0, 0)}


def test_cost_is_per_million_tokens_with_a_separate_cached_price():
    table = PriceTable({"m": Price(2.0, 10.0, 0.5)})
    assert table.cost("m", 1_000_000, 0) == 2.0
    assert table.cost("m", 0, 1_000_000) == 10.0
    assert table.cost("m", 1_000_000, 0, cached_tokens=1_000_000) == 0.5


def test_cache_writes_cost_the_price_of_input_unless_they_have_one(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("a: {input: 2, output: 10, cached: 0.5, cache_write: 2.5}\nb: {input: 2, output: 10, cached: 0.5}")
    for table in (load_prices(path), PriceTable({"a": Price(2, 10, 0.5, 2.5), "b": Price(2, 10, 0.5)})):
        assert table.cost("a", 1000, 10, 600, 300) == pytest.approx((100 * 2 + 600 * 0.5 + 300 * 2.5 + 10 * 10) / 1e6)
        assert table.cost("b", 1000, 10, 600, 300) == table.cost("b", 1000, 10, 600)


def test_unknown_model_has_no_cost_and_free_model_costs_zero():
    table = PriceTable({"free": Price(0.0, 0.0, 0.0)})
    assert table.cost("m", 5, 5) is None
    assert table.cost("free", 5, 5) == 0.0


@given(COUNTS, COUNTS, COUNTS)
def test_equal_cached_price_makes_caching_irrelevant(prompt, completion, cached):
    table = PriceTable({"m": Price(3.0, 7.0, 3.0)})
    assert table.cost("m", prompt, completion, cached) == pytest.approx(table.cost("m", prompt, completion))


@pytest.mark.parametrize(
    "text, said",
    [
        ("m: {input: 1}", "m.output: missing"),
        ("m: {input: -1, output: 1}", "m.input: expected a non-negative price in US dollars per million tokens"),
        ("m: {input: '1', output: 1}", "got '1'"),
        ("m: {input: true, output: 1}", "got True"),
        ("m: {input: .nan, output: 1}", "got nan"),
        ("m: {input: 1, output: 1, cached: null}", "m.cached: missing"),
        ("m: {input: 1, outptu: 1}", "m.outptu: unknown key; did you mean 'output'?"),
        ("m: 3", "m: expected {input"),
        ("- m", "expected a mapping of model names to prices, got list"),
        ("{", "not YAML"),
    ],
)
def test_invalid_price_is_reported_with_file_and_field(tmp_path, text, said):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_prices(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_unreadable_price_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read"):
        load_prices(tmp_path / "no.yaml")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_prices(tmp_path / "p.json")

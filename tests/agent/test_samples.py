"""Test samples: seeds, ids and first messages."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agent.samples import (
    Prompt,
    PromptError,
    Sample,
    derive_seed,
    derive_seeds,
    make_group_id,
    make_rollout_id,
)
from reward_kit.environments.config import deep_merge
from reward_kit.errors import ConfigError
from tests.agent.resources import task_of


def render(row, observation="", where="", **fields):
    messages = Prompt(task_of(**fields)).render(Sample("s1", row, where=where), observation)
    return [(message.role, message.content) for message in messages]


class TestTemplates:
    def test_row_fields_fill_all_messages_and_the_prompt(self):
        messages = [{"role": "system", "content": "Be {{ tone }}."}, {"role": "assistant", "content": "plain"}]
        got = render({"tone": "kind", "n": 3}, messages=messages, initial_user_prompt="{{ n + 1 }}?")
        assert got == [("system", "Be kind."), ("assistant", "plain"), ("user", "4?")]

    def test_text_parts_are_rendered_and_other_parts_kept(self):
        image = {"type": "image_url", "image_url": {"url": "{{ x }}"}}
        content = [{"type": "text", "text": "{{ x }}"}, image]
        assert render({"x": 1}, messages=[{"role": "user", "content": content}]) == [
            ("user", [{"type": "text", "text": "1"}, image])
        ]

    def test_missing_field_is_reported_with_row_and_known_fields(self):
        with pytest.raises(ConfigError) as caught:
            render({"answer": 1, "query": 2}, initial_user_prompt="{{ question }}", where="data.jsonl:7")
        assert str(caught.value) == (
            "sample 's1' (data.jsonl:7): message template '{{ question }}': 'question' is undefined; "
            "known: answer, observation, query"
        )

    @pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ n() }}", "{{ n.__class__.__mro__ }}", "{{ n.nothing }}"])
    def test_failing_template_is_a_config_error(self, template):
        with pytest.raises(ConfigError, match="sample 's1': message template"):
            render({"n": 1}, initial_user_prompt=template)

    def test_prompt_error_can_be_pickled(self):
        with pytest.raises(PromptError) as caught:
            render({}, initial_user_prompt="{{ n.x }}")
        crossed = pickle.loads(pickle.dumps(caught.value))
        assert (str(crossed), crossed.key) == (str(caught.value), ("initial_user_prompt",))

    def test_template_with_a_syntax_error_is_rejected_at_once(self):
        with pytest.raises(ConfigError, match="task 'task': message template"):
            Prompt(task_of(initial_user_prompt="{% if %}"))

    def test_text_without_braces_is_not_a_template_and_keeps_newlines(self):
        assert render({}, initial_user_prompt="100 % sure\n") == [("user", "100 % sure\n")]
        assert render({"x": 1}, initial_user_prompt="{{ x }}\n") == [("user", "1\n")]


class TestObservation:
    def test_observation_is_appended_unless_a_template_uses_it(self):
        assert render({}, "a maze", initial_user_prompt="Go.") == [("user", "Go."), ("user", "a maze")]
        assert render({}, "a maze", initial_user_prompt="In {{ observation }}: go.") == [("user", "In a maze: go.")]
        assert render({}, "", initial_user_prompt="Go.") == [("user", "Go.")]

    def test_observation_field_of_the_row_is_used_without_an_environment(self):
        assert render({"observation": "mine"}, "", initial_user_prompt="{{ observation }}") == [("user", "mine")]
        assert render({"observation": "mine"}, "shown", initial_user_prompt="{{ observation }}") == [("user", "shown")]


class TestRowMessages:
    def test_row_messages_are_used_if_the_task_has_none(self):
        row = {"messages": [{"role": "user", "content": "{{ kept }}"}]}
        assert render(row) == [("user", "{{ kept }}")]
        assert render(row, initial_user_prompt="mine") == [("user", "mine")]

    @pytest.mark.parametrize("messages", [[{"role": "robot"}], "text", [1]])
    def test_invalid_message_is_a_config_error_with_its_row(self, messages):
        with pytest.raises(ConfigError, match=r"sample 's1' \(d:1\): messages: "):
            render({"messages": messages}, where="d:1")


class TestSeedsAndIds:
    def test_seeds_are_stable(self):
        # Pinned: another value would make every recorded run irreproducible.
        assert derive_seed("policy", 0, "s", 1, "") == 2_318_938_968_626_468_491
        assert make_group_id(0, "s") == "s-8b18e67f7aae"

    @given(st.integers(), st.text(st.characters()))
    def test_seed_fits_63_bits(self, run, sample):
        assert 0 <= derive_seed(run, sample) < 2**63

    def test_label_changes_the_policy_seed_only(self):
        one, two = (derive_seeds(0, "s", 0, "independent", label) for label in "ab")
        assert one.policy != two.policy
        assert (one.environment, one.noise) == (two.environment, two.noise)

    def test_ids_are_safe_file_names_and_distinct(self):
        ids = {make_group_id(0, sample) for sample in ("a/b", "a b", "日本", "中国", "x" * 50, "x" * 60)}
        assert len(ids) == 6
        assert all(group_id.replace("-", "").isalnum() and group_id.isascii() for group_id in ids)
        assert make_group_id(0, "a/b").startswith("a-b-")
        assert make_rollout_id("g", 3) == "g-3"

    def test_ids_do_not_collide(self):
        assert len({make_group_id(0, f"{'x' * 40}{n}") for n in range(20_000)}) == 20_000


def test_deep_merge_merges_nested_keys_without_changing_its_inputs():
    base, over = {"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"y": 3}, "b": [2], "c": {}}
    assert deep_merge(base, over) == {"a": {"x": 1, "y": 3}, "b": [2], "c": {}}
    assert (base, over) == ({"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"y": 3}, "b": [2], "c": {}})


def test_resource_config_in_the_row_alone_is_rejected() -> None:
    config = {"index": 3}
    with pytest.raises(ConfigError, match="sample 'a': resource_config in the row has no effect"):
        Sample("a", {"resource_config": config})
    assert Sample("a", {"resource_config": config}, resource_config=config).resource_config == config

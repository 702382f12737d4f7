"""The calls of a user's `compute_score`: one rollout at a time or a group, sync or async, with its log and the rest."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reward_kit.errors import InvalidResultError, RewardKitError, kind_of, safe_str
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.custom.answers import failed, finished, read_answer, scores_of
from reward_kit.reward_agent.custom.forms import GIVEN, VARIABLE, WANTED, Form
from reward_kit.reward_calls import BATCH_NAMES

_LOGGED = (*GIVEN, "score", "query", "response")

logger = logging.getLogger("reward_kit.reward_agent")


class Calls:
    """Calls a user's `compute_score`, and what belongs to it.

    Args:
        owner: the function, or the object that has the methods.
        form: what its signatures say.
    """

    def __init__(self, owner: Any, form: Form) -> None:
        self.form = form
        self._compute = getattr(owner, "compute_score", owner)
        self._log = _taken_log(getattr(owner, "log", None)) if self._compute is not owner else None
        self.post: Callable[[list[float]], Any] | None = getattr(owner, "post_process_scores", None)

    def one(self, values: Mapping[str, Any]) -> EvaluateResult:
        """The result for one rollout."""
        named = self.form.arguments(values)
        result = read_answer(self._compute(**named), self.form.id)
        if self._log is not None:
            with self._warning():
                self._log(named, result)
        return result

    async def one_awaited(self, values: Mapping[str, Any]) -> EvaluateResult:
        """As `one`, of a coroutine function."""
        named = self.form.arguments(values)
        result = read_answer(await self._compute(**named), self.form.id)
        if self._log is not None:
            with self._warning():
                told = self._log(named, result)
                if inspect.isawaitable(told):
                    await told
        return result

    def all(self, lists: Mapping[str, Any]) -> list[EvaluateResult]:
        """The results for a group, where its calls cannot be made apart."""
        rollouts = _apart(lists)
        if self.form.is_batch:
            results = self._read_all(self._compute(**self.form.batch_arguments(rollouts)), len(rollouts))
        else:
            results = []
            for values in rollouts:
                try:
                    results.append(self.one(values))
                except Exception as error:  # noqa: BLE001 - its own rollout is unscored, and the others are not
                    results.append(failed(_why(error)))
        if self.post is None:
            return results
        return finished(results, self.post(scores_of(results)), self.form.id)

    async def all_awaited(self, lists: Mapping[str, Any]) -> list[EvaluateResult]:
        """As `all`, of a coroutine function; the calls of a group run beside one another."""
        rollouts = _apart(lists)
        if self.form.is_batch:
            results = self._read_all(await self._compute(**self.form.batch_arguments(rollouts)), len(rollouts))
        else:
            results = list(await asyncio.gather(*map(self._one_or_why_not, rollouts)))
        if self.post is None:
            return results
        processed = self.post(scores_of(results))
        return finished(results, await processed if inspect.isawaitable(processed) else processed, self.form.id)

    async def _one_or_why_not(self, values: Mapping[str, Any]) -> EvaluateResult:
        try:
            return await self.one_awaited(values)
        except Exception as error:  # noqa: BLE001 - its own rollout is unscored, and the others are not
            return failed(_why(error))

    def _read_all(self, returned: Any, count: int) -> list[EvaluateResult]:
        answers = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(answers, list | tuple):
            raise InvalidResultError(f"{self.form.id}: for several solutions it returns a list, not {kind_of(answers)}")
        if len(answers) != count:
            raise InvalidResultError(f"{self.form.id}: {len(answers)} scores for {count} solutions")
        results = []
        for index, answer in enumerate(answers):
            try:
                results.append(read_answer(answer, f"{self.form.id}[{index}]"))
            except InvalidResultError as error:
                results.append(failed(str(error)))
        return results

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Around the user's own log: that it fails says nothing of the score, which stands."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - hostile code may raise anything here
            logger.warning("log of %s: %s: %s", self.form.id, type(error).__name__, safe_str(error))


def _why(error: Exception) -> str:
    if isinstance(error, MemoryError):
        raise error  # a limit, which the walls name
    return safe_str(error) if isinstance(error, RewardKitError) else f"{type(error).__name__}: {safe_str(error)}"


def _apart(lists: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values of each rollout of a group; an option is one for all of them."""
    count = len(lists["rollouts_messages"])
    singular = {many: one for one, many in BATCH_NAMES.items()}
    per_rollout = {*singular, *WANTED}
    return [
        {
            singular.get(name, name): value[i] if name in per_rollout and isinstance(value, list) else value
            for name, value in lists.items()
        }
        for i in range(count)
    ]


def _taken_log(log: Any) -> Callable[[Mapping[str, Any], EvaluateResult], Any] | None:
    """A user's `log` where it takes what a score has; one that takes something else is a helper of their own."""
    if not callable(log):
        return None
    parameters = inspect.signature(log).parameters.values()
    needed = {each.name for each in parameters if each.default is each.empty and each.kind not in VARIABLE}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = set(_LOGGED) if takes_any else {each.name for each in parameters} & set(_LOGGED)
    if not names or needed - names:
        return None

    def call(named: Mapping[str, Any], result: EvaluateResult) -> Any:
        score = result.score if result.is_score_valid else float("nan")
        told = {**named, "score": score, "query": result.query, "response": result.response}
        return log(**{name: told.get(name) for name in names})

    return call

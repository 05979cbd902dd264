"""Which versions are refused because engines end with them."""

from __future__ import annotations

from service.ipc.messages import ModelKey, ModelVersion
from service.supervisor.trials import MAX_ENDS, Trials

WORDS, OTHER = ModelVersion("words", "1", 1, "", ""), ModelVersion("other", "1", 2, "", "")


def end(
    trials: Trials, key: ModelKey, *, survived: frozenset[ModelKey] = frozenset({OTHER.key}), elsewhere: bool = False
) -> str:
    """Count an end, and return the reason with which the version is refused, empty if it is not."""
    error = trials.count_end(key, survived=survived, ran_elsewhere=elsewhere)
    return "" if error is None else error.message


def test_version_is_refused_after_a_fixed_number_of_ends() -> None:
    trials = Trials()
    reasons = [end(trials, WORDS.key) for _ in range(MAX_ENDS)]
    assert reasons == [""] * (MAX_ENDS - 1) + [
        f"{MAX_ENDS} engines in a row ended while they loaded this version or ran its first batch"
    ]
    assert trials.to_load([WORDS, OTHER]) == [OTHER]
    assert not end(trials, WORDS.key), "it is refused once"
    trials.keep({OTHER.key})
    assert trials.to_load([WORDS, OTHER]) == [WORDS, OTHER], "a version that is forgotten can be loaded again"
    end(trials, WORDS.key)
    assert trials.to_load([WORDS, OTHER]) == [OTHER, WORDS], "versions with which engines ended are loaded last"


def test_run_in_between_begins_the_count_again() -> None:
    trials = Trials()
    for _ in range(3):
        assert not any(end(trials, WORDS.key) for _ in range(MAX_ENDS - 1))
        trials.count_pass(WORDS.key)
    assert not trials.has_ended_engines(WORDS.key)


def test_version_is_kept_while_the_device_may_be_the_cause() -> None:
    """It is refused once an engine ends with it after loading another version, unless it has run in another engine."""
    trials = Trials()
    assert not any(end(trials, WORDS.key, elsewhere=True) for _ in range(2 * MAX_ENDS))
    assert not any(end(trials, WORDS.key, survived=frozenset({WORDS.key})) for _ in range(2 * MAX_ENDS))
    assert end(trials, WORDS.key)

"""A skip is a failure where everything must run, unless there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

SKIPPED = "import pytest\n\ndef test_it(): pytest.skip('the program is missing')"
IN_A_FIXTURE = """
import pytest

@pytest.fixture
def program(): pytest.skip("the program is missing")

def test_it(program): pass
"""
BY_A_MARKER = "import pytest\n\n@pytest.mark.skip(reason='the program is missing')\ndef test_it(): pass"
WHOLE_FILE = "import pytest\n\npytest.importorskip('no_such_package')\n\ndef test_it(): pass"
ON_A_GPU = "import pytest\n\n@pytest.mark.gpu\ndef test_it(): raise AssertionError('there is no GPU')"
SKIPPED_ON_A_GPU = "import pytest\n\n@pytest.mark.gpu\ndef test_it(): pytest.skip('the program is missing')"
EXPECTED_TO_FAIL = "import pytest\n\n@pytest.mark.xfail\ndef test_it(): raise AssertionError"
PASSES = "def test_it(): pass"
# A worker of pytest-xdist has imported that plugin before pytest could rewrite its assertions.
OPTIONS = ("-p", "tests.conftest", "-W", "ignore::pytest.PytestAssertRewriteWarning")


@pytest.fixture(autouse=True)
def _markers(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = gpu: needs a GPU")


def outcomes(pytester: pytest.Pytester, code: str) -> dict[str, int]:
    """The outcome of a test with this code under the hooks of these tests."""
    pytester.makepyfile(code)
    return pytester.runpytest_inprocess(*OPTIONS).parseoutcomes()


@pytest.mark.parametrize("code", [SKIPPED, IN_A_FIXTURE, BY_A_MARKER, WHOLE_FILE])
def test_skip_fails_only_when_all_tests_must_run(code: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(pytester, code) == {"skipped": 1}
    monkeypatch.setenv("SEQSERVE_TEST_ALL", "1")
    assert outcomes(pytester, code) in ({"failed": 1}, {"errors": 1})


def test_failure_has_the_reason_of_the_skip(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_TEST_ALL", "1")
    pytester.makepyfile(SKIPPED)
    result = pytester.runpytest_inprocess(*OPTIONS)
    result.stdout.fnmatch_lines("*SEQSERVE_TEST_ALL is 1, and this test was skipped. Skipped: the program is missing*")


@pytest.mark.parametrize("everything", ["0", "1"])
def test_gpu_test_may_be_skipped_without_a_gpu(
    everything: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQSERVE_TEST_ALL", everything)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert outcomes(pytester, ON_A_GPU) == {"skipped": 1}


def test_gpu_test_may_not_be_skipped_on_a_gpu(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_TEST_ALL", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert outcomes(pytester, SKIPPED_ON_A_GPU) == {"failed": 1}


@pytest.mark.parametrize(("code", "outcome"), [(PASSES, "passed"), (EXPECTED_TO_FAIL, "xfailed")])
def test_other_outcomes_stay(code: str, outcome: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_TEST_ALL", "1")
    assert outcomes(pytester, code) == {outcome: 1}


def test_settings_of_the_shell_are_hidden(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_TEST_ALL", "1")
    monkeypatch.setenv("SEQSERVE_PORT", "9000")
    code = "import os\n\ndef test_it(): assert not [name for name in os.environ if name.startswith('SEQSERVE_')]"
    assert outcomes(pytester, code) == {"passed": 1}
    assert "SEQSERVE_PORT" not in os.environ

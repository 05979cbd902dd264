"""Changes of the served models, with a real models folder and fake processes: order of calls, refusals, index, polling."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from service.errors import InvalidInput, InvalidModel, ModelError, NoRoom, Unavailable, UnknownModel, Unsupported
from service.ipc.messages.control import MAX_POLICY_CHARACTERS, CloseModel, ForgetModel, PrepareModel, ServeModels
from service.ipc.messages.models import ModelKey
from service.log import Log
from service.metrics import GONE, Metrics
from service.modeling import spec
from service.settings import Settings
from service.supervisor import reload
from service.supervisor.process import Child
from service.supervisor.reload import ModelReloader
from service.supervisor.repository import Repository
from service.supervisor.trials import Trials
from tests import models
from tests.supervisor.fakes import FakeChild


class Supervised:
    """A reloader over a folder with version 1 of words, with one engine and two frontends."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.engine, self.frontend, self.other = (FakeChild(name) for name in ("engine-0", "frontend-0", "frontend-1"))
        self.metrics, self.trials, self.unloaded = Metrics(), Trials(), list[ModelKey]()
        given = Settings(models=root, **settings)
        self.reloader = ModelReloader(
            Repository(root, given.versions),
            given,
            lambda: cast("list[Child]", [self.frontend, self.engine, self.other]),
            self.unloaded.append,
            self.trials,
            self.metrics,
            Log("test"),
        )

    def served(self) -> list[tuple[str, str]]:
        return [(version.name, version.version) for version in self.reloader.manifest.model_versions]

    async def states(self, name: str = "words") -> dict[str, tuple[str, str]]:
        return {entry.version: (entry.state, entry.reason) for entry in await self.reloader.index() if entry.name == name}

    async def closed(self, count: int = 1) -> list[CloseModel]:
        """Return the versions that the engine is told to unload, which happens in the background."""
        while len(found := self.engine.took(CloseModel)) < count:
            await asyncio.sleep(0)
        return found

    def changes(self) -> dict[str, float]:
        return {labels[0]: values[0] for labels, values in self.metrics.snapshot()["seqserve_model_changes"] if values[0]}


def run(scenario: Callable[[Supervised], Coroutine[Any, Any, None]], root: Path, **settings: Any) -> None:
    async def within() -> None:
        supervised = Supervised(root, **settings)
        try:
            async with asyncio.timeout(60):
                await scenario(supervised)
        finally:
            supervised.reloader.close()

    asyncio.run(within())


def with_reloader(scenario: Callable[[Supervised], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """Return a test that runs a scenario with the default settings."""

    def test(root: Path) -> None:
        run(scenario, root)

    return test


def other_weights(folder: Path) -> None:
    file = folder / spec.WEIGHTS
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")


@with_reloader
async def test_engines_prepare_before_frontends_switch_and_engines_unload(at: Supervised) -> None:
    models.words(at.root, version=2, seed=2)
    await at.reloader.load("words", "latest")
    assert at.served() == [("words", "2")]
    [prepared], [switched] = at.engine.took(PrepareModel), at.frontend.took(ServeModels)
    assert (prepared.model_version.version, switched.manifest) == ("2", at.reloader.manifest)
    assert [type(call) for call in at.frontend.calls] == [PrepareModel, ServeModels]
    assert at.other.calls == at.frontend.calls
    assert (await at.states())["1"][0] == "UNLOADING" and (await at.states())["2"][0] == "READY"
    [closing] = await at.closed()
    assert (closing.key.version, closing.seconds) == ("1", reload.UNLOAD_SECONDS)
    assert not at.unloaded and not at.frontend.took(ForgetModel)
    at.engine.unused.set()
    while not at.unloaded:
        await asyncio.sleep(0)
    assert [key.version for key in at.unloaded] == ["1"] and at.frontend.took(ForgetModel)
    assert (await at.states())["1"] == ("UNAVAILABLE", "the version policy does not select it")


@with_reloader
async def test_only_changed_versions_are_prepared(at: Supervised) -> None:
    first = at.reloader.manifest
    await at.reloader.load("words")
    assert at.reloader.manifest is first and not at.engine.calls and not at.frontend.calls
    models.words(at.root, seed=5)
    await at.reloader.load("words")
    [prepared], [closed] = at.engine.took(PrepareModel), await at.closed()
    assert closed.key == first.model_versions[0].key != prepared.model_version.key
    at.engine.unused.set()
    await asyncio.sleep(0.01)
    assert not at.unloaded, "the version is served, so its metrics stay"


@with_reloader
async def test_loads_and_unloads_follow_the_newest_policy(at: Supervised) -> None:
    """A policy of a client holds until the next. Aliases are read with each load."""
    for version in (2, 3):
        models.words(at.root, version=version, seed=version)
    (at.root / spec.ALIASES).write_text('any = "words"')
    for policy, served in (("latest", ["3"]), (None, ["3"]), ("1,2", ["1", "2"]), (None, ["1", "2"])):
        await at.reloader.load("words", policy)
        assert at.served() == [("words", version) for version in served]
    assert at.frontend.took(ServeModels)[-1].manifest.aliases == {"any": "words"}
    with pytest.raises(InvalidInput, match="shorten it"):
        await at.reloader.load("words", "1" * (MAX_POLICY_CHARACTERS + 1))
    for name in ("nobody", "../models", "/etc", "."):
        with pytest.raises(UnknownModel):
            await at.reloader.load(name)
    assert at.reloader.manifest.unavailable == [], "names of clients are not kept"
    (at.root / spec.ALIASES).write_text('any = "nobody"')
    with pytest.raises(InvalidModel, match="any stands for 'nobody'"):
        await at.reloader.load("words")
    (at.root / spec.ALIASES).unlink()
    models.tagger(at.root)
    await at.reloader.load("tagger")
    await at.reloader.unload("words")
    assert at.served() == [("tagger", "1")]
    for name, others in (("words", "tagger"), ("tagger", "none")):
        if others == "none":
            await at.reloader.unload("tagger")
        with pytest.raises(UnknownModel, match=f"served are {others}"):
            await at.reloader.unload(name)
    await at.reloader.load("words")
    assert at.served() == [("words", "1"), ("words", "2")]
    assert at.changes() == {"ok": 8, "unknown_model": 6, "invalid_model": 1}
    at.reloader.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await at.reloader.load("words")


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"reload": "off"}, "SEQSERVE_RELOAD is off"),
        ({"reload": "off", "replicated": True}, "SEQSERVE_RELOAD is off"),
        ({"replicated": True}, "set SEQSERVE_RELOAD=poll"),
        ({"replicated": True, "reload": "poll"}, r"versions\.toml"),
    ],
    ids=str,
)
def test_settings_refuse_changes(settings: dict[str, Any], refusal: str, root: Path) -> None:
    """Replicas that poll take loads of what all will serve."""

    async def scenario(at: Supervised) -> None:
        polls = settings["reload"] == "poll" if "reload" in settings else False
        for change in (at.reloader.load("words", "latest" if polls else None), at.reloader.unload("words")):
            with pytest.raises(Unsupported, match=refusal):
                await change
        assert at.served() == [("words", "1")]
        if polls:
            models.words(root, version=2, seed=2)
            await at.reloader.load("words")
            assert len(at.served()) == 2

    run(scenario, root, **settings)


@with_reloader
async def test_invalid_version_leaves_the_old_one_and_its_reason_is_listed(at: Supervised) -> None:
    """Without the path of the models folder."""
    before = at.reloader.manifest
    models.words(at.root, version=2, seed=2)
    other_weights(at.root / "words" / "2")
    at.engine.errors[PrepareModel] = InvalidModel(f"{at.root}/words/2/weights.safetensors does not have the digest")
    with pytest.raises(InvalidModel, match=r"^words/2/weights.safetensors"):
        await at.reloader.load("words")
    assert at.reloader.manifest == before
    assert (await at.states())["2"] == ("UNAVAILABLE", "words/2/weights.safetensors does not have the digest")
    [closed] = await at.closed()
    assert (closed.key.version, closed.seconds) == ("2", 0.0), "processes drop what they prepared"
    shutil.rmtree(at.root / "words" / "2")
    await at.reloader.load("words")
    assert await at.states() == {"1": ("READY", "")}


@pytest.mark.parametrize("refuses", ["engine", "frontend"])
def test_refusal_of_one_process_is_a_refusal_of_the_load(refuses: str, root: Path) -> None:
    async def scenario(at: Supervised) -> None:
        models.words(root, version=2, seed=2)
        child: FakeChild = getattr(at, refuses)
        child.errors[PrepareModel] = NoRoom("unload another version")
        with pytest.raises(NoRoom):
            await at.reloader.load("words")
        assert at.served() == [("words", "1")]
        child.ended.set()
        await at.reloader.load("words")
        assert len(at.served()) == 2, "the successor of a process that ended starts with the manifest"

    run(scenario, root)


@pytest.mark.parametrize("refuses", ["frontend", "other"])
def test_frontend_that_does_not_switch_is_killed(refuses: str, root: Path) -> None:
    """The other frontend serves the new versions."""

    async def scenario(at: Supervised) -> None:
        child: FakeChild = getattr(at, refuses)
        child.errors[ServeModels] = Unavailable("busy")
        await at.reloader.unload("words")
        assert at.served() == [] and child.killed == "ended"
        assert all(frontend.took(ServeModels) for frontend in (at.frontend, at.other))
        assert [frontend.killed for frontend in (at.frontend, at.other)].count("") == 1

    run(scenario, root)


@with_reloader
async def test_load_fails_when_its_engine_ends_with_it(at: Supervised) -> None:
    models.words(at.root, version=2, seed=2)
    preparing, call = asyncio.Event(), at.engine.call

    async def ending(message: Any, reply: type, *, timeout: float | None = None) -> Any:
        if isinstance(message, PrepareModel):
            at.engine.on_trial.add(message.model_version.key)
            at.engine.ended.set()
            assert [version.version for version in at.reloader.engine_manifest().model_versions] == ["1", "2"]
            assert (await at.states())["2"][0] == "LOADING"
            at.trials.count_end(message.model_version.key, survived=frozenset(), ran_elsewhere=False)
            assert [version.version for version in at.reloader.engine_manifest().model_versions] == ["1"]
            preparing.set()
            raise Unavailable("engine-0 has ended")
        return await call(message, reply, timeout=timeout)

    at.engine.call = ending  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="ended while it loaded words version 2"):
        await at.reloader.load("words")
    assert preparing.is_set() and at.served() == [("words", "1")]


@pytest.mark.parametrize("everywhere", [False, True])
def test_version_that_a_process_started_without_is_loaded_again(everywhere: bool, root: Path) -> None:
    async def scenario(at: Supervised) -> None:
        [version] = at.reloader.manifest.model_versions
        await at.reloader.leave_out(version.key, InvalidModel(f"{root}/words is damaged"), everywhere=everywhere)
        await at.reloader.leave_out(version.key, InvalidModel("again"), everywhere=everywhere)
        assert at.served() == ([] if everywhere else [("words", "1")])
        assert at.changes() == {"invalid_model": 1}
        listed = at.reloader.manifest.unavailable
        assert [entry.reason for entry in listed] == (["words is damaged"] if everywhere else [])
        await at.reloader.load("words")
        assert at.served() == [("words", "1")] and at.engine.took(PrepareModel) and not at.reloader.manifest.unavailable

    run(scenario, root)


@pytest.mark.parametrize("change", ["load", "unload"])
def test_change_whose_client_has_gone_is_cancelled(change: str, root: Path) -> None:
    """Also while it waits for another change."""

    async def scenario(at: Supervised) -> None:
        models.words(root, version=2, seed=2)
        models.tagger(root)
        await at.reloader.load("tagger")
        reached, call = asyncio.Event(), at.engine.call

        async def stalled(message: Any, reply: type, *, timeout: float | None = None) -> Any:
            if isinstance(message, PrepareModel):
                reached.set()
                await asyncio.Event().wait()
            return await call(message, reply, timeout=timeout)

        at.engine.call = stalled  # type: ignore[method-assign]
        first = asyncio.ensure_future(at.reloader.load("words"))
        await reached.wait()
        second = asyncio.ensure_future(getattr(at.reloader, change)("tagger"))
        await asyncio.sleep(0)
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert at.served() == [("tagger", "1"), ("words", "1")]
        assert at.changes() == {"ok": 1, GONE: 2}
        [dropped] = await at.closed()
        assert (dropped.key.version, dropped.seconds) == ("2", 0.0)

    run(scenario, root)


def test_polled_folder_is_served_as_it_changes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is loaded when its files have not changed between two reads, so most copies are complete."""
    monkeypatch.setattr(reload, "POLL_SECONDS", 0.001)

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.001)

    async def scenario(at: Supervised) -> None:
        polling = asyncio.ensure_future(at.reloader.poll())
        models.words(tmp_path / "elsewhere", version=2, seed=2)
        folder, source = root / "words" / "2", tmp_path / "elsewhere" / "words" / "2"
        folder.mkdir()
        (folder / spec.MODEL).write_text("name = ")
        await until(lambda: at.changes().get("invalid_model", 0) == 1)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        await until(lambda: at.served() == [("words", "2")])
        models.tagger(root)
        await until(lambda: ("tagger", "1") in at.served())
        (root / spec.ALIASES).write_text('any = "words"')
        await until(lambda: at.reloader.manifest.aliases == {"any": "words"})
        shutil.rmtree(root / "tagger")
        await until(lambda: at.served() == [("words", "2")])
        at.reloader.close()
        await polling

    run(scenario, root, reload="poll", versions="latest")


def test_broken_models_are_left_out_at_the_start_unless_it_is_strict(root: Path) -> None:
    async def scenario(at: Supervised) -> None:
        assert at.served() == [("words", "1")] and at.changes() == {"invalid_model": 2}
        reasons = {entry.name: entry.reason for entry in at.reloader.manifest.unavailable}
        assert reasons["broken"].startswith("broken/1/model.toml") and "has no version folder" in reasons["empty"]
        models.words(root, "broken")
        await at.reloader.load("broken")
        assert ("broken", "1") in at.served()

    (root / "empty").mkdir()
    models.words(root, "broken")
    (root / "broken" / "1" / spec.MODEL).write_text("name = ")
    run(scenario, root, strict=False)
    (root / "broken" / "1" / spec.MODEL).write_text("name = ")
    with pytest.raises(ModelError, match=r"broken/1/model\.toml|has no version folder"):
        Supervised(root, strict=True)

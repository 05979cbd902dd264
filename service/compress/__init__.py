"""Stores a model in a lower precision, as a new version, and measures what that changes: `seqserve compress`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from kernels.folder import set_cache_folder
from service.compress.comparison import Inputs, compare, random_inputs, read_labelled_texts
from service.cores import usable_cores
from service.errors import ModelError
from service.modeling import spec, store
from service.modeling.encoder import Encoder
from service.modeling.spec.files import replacing
from service.modeling.tokenizer import Tokenizer
from service.settings import Settings

EARLIER_SECTION = re.compile(r"^## Compression\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def compress(
    settings: Settings,
    model: str,
    precision: str,
    *,
    version: int | None = None,
    name: str | None = None,
    data: Path | None = None,
) -> tuple[Path, str]:
    """Write a version of a model with another precision; return its folder and the section "Compression" of its card.

    version: the version to read, or None for the newest; name: of a new model, or None for the next version of the same model;
    data: a file of labelled texts, or None to compare the versions on random inputs. Raises ModelError.
    """
    torch.set_num_threads(usable_cores())
    set_cache_folder(settings.cache)
    root = settings.written_models
    model, source = store.find_version(settings.models, model, version, settings.alias)
    spec.require_models_folder(root)
    target = _target(root, model, name)
    before = spec.read(source, model)
    if precision == before.precision:
        raise ModelError(f"{source} has the precision {precision} already: choose another")
    tokenizer = Tokenizer.read(source, before) if before.input.kind == "text" else None
    inputs = random_inputs(before) if data is None else read_labelled_texts(data, before, tokenizer)
    described = before.model_copy(update={"name": target.parent.name, "precision": precision, "sha256": {}})
    definition = None if tokenizer is None else tokenizer.definition.decode()
    with replacing(target, root) as written:
        after = store.write(written, described, store.read_arrays(source, before), card="", tokenizer=definition)
        section = _section((source, before), (written, after), inputs)
        card = source / spec.CARD
        rest = EARLIER_SECTION.sub("", card.read_text()).strip() if card.exists() else ""
        (written / spec.CARD).write_text(f"{rest}\n\n{section}".lstrip())
    return target, section


def _target(root: Path, model: str, name: str | None) -> Path:
    """Return the folder of the version to write; raises ModelError for a new name that exists."""
    if name is None:
        return spec.next_version(root, model)
    if not spec.NAME.fullmatch(name):
        raise ModelError(f"{name!r} is not a name of a model: use letters, digits, '.', '_' and '-'")
    models = spec.versions_by_folder(root)
    if name in models or name in spec.read_aliases(root, models):
        raise ModelError(f"{name} exists in {root}: choose another name, or leave --name out for the next version of {model}")
    return root / name / "1"


def _section(before: tuple[Path, spec.ModelSpec], after: tuple[Path, spec.ModelSpec], inputs: Inputs) -> str:
    """Compare two versions on a CPU, and return the section of the card."""
    versions, device = (before, after), torch.device("cpu")
    encoders = [Encoder(described, store.read_arrays(folder, described), device) for folder, described in versions]
    comparison, same = compare(encoders, inputs), ""
    sizes = [f"{(folder / spec.WEIGHTS).stat().st_size:,}" for folder, _ in versions]
    rows = [("precision", before[1].precision, after[1].precision), ("bytes of the weights", *sizes)]
    if comparison.accuracies:
        rows.append(("accuracy", *(f"{100 * accuracy:.1f} %" for accuracy in comparison.accuracies)))
    if comparison.same_best is not None:
        same = f" The best answer is the same for {100 * comparison.same_best:.1f} % of them."
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return (
        "## Compression\n\n"
        f"`seqserve compress` made these weights of version {before[0].name} of {before[1].name}.\n\n"
        f"| | before | after |\n|---|---|---|\n{table}\n\n"
        f"Both versions answered {inputs.origin}, on a CPU.{same}\n"
        f"The outputs differ by {comparison.largest:.2g} at most and by {comparison.mean:.2g} on average.\n"
    )

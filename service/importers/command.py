"""Implements `seqserve import`: turns a foreign checkpoint into a model folder, and compares the model with its source."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from kernels.folder import set_cache_folder
from service.cores import usable_cores
from service.importers import pytorch, tensorflow1
from service.importers.card import card, table
from service.importers.check import NotCompared, SourceComparison, compare_with_original, differences
from service.importers.draft import DEFAULT_STEPS, UNFIT, Draft, ImportRefused
from service.importers.formats import BY_SUFFIX, FORMATS, LAYER_TABLES, has_code
from service.importers.head_kind import answer_as
from service.importers.recipe import Recipe
from service.importers.write import model_spec, tensors, write_version
from service.modeling import spec
from service.modeling.array_run import STATE, read_batch
from service.modeling.encoder import Encoder
from service.modeling.npz import read_npz
from service.modeling.spec.files import read_file
from service.modeling.tokenizer import Tokenizer
from service.settings import Settings

PACKAGES = ("h5py", "onnx")
"""Packages of the extra `import`."""
RUNNERS = {"ONNX graph": " (install onnxruntime, which seqserve[import] has)", "Keras 3": " (install keras 3 and its backend)"}
"""The way to a comparison, by the source. Without one, such a model is imported all the same: its file says everything."""


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """The arguments of an import.

    checkpoint: the file; name: of the model; format: a name in `formats.FORMATS`, or None to derive it from the file name; recipe: a file,
    or None; weights: the places of a state_dict within the checkpoint, or None for its only one; tokenizer: a tokenizer.json for models of
    texts, or None; check: a .npz of inputs and expected outputs, or None; tolerance: the largest difference that passes; assume: whether
    assumptions need no proof; labels: a file with a label in each line, or None; max_steps: the longest sequence, or None.
    """

    checkpoint: Path
    name: str
    format: str | None = None
    recipe: Path | None = None
    weights: str | None = None
    tokenizer: Path | None = None
    check: Path | None = None
    tolerance: float = 1e-5
    assume: bool = False
    labels: Path | None = None
    max_steps: int | None = None


def import_model(settings: Settings, request: ImportRequest, say: Callable[[str], None]) -> Path:
    """Write a version folder and return it. say: receives each line of the report.

    Raises ModelError for a checkpoint that cannot be imported, and for outputs that differ by more than the tolerance; ImportQuestion
    if something was assumed, and no comparison proves it.
    """
    torch.set_num_threads(usable_cores())
    set_cache_folder(settings.cache)
    recipe = Recipe() if request.recipe is None else Recipe.read(request.recipe)
    recipe = recipe.completed(request.labels, request.max_steps)
    draft = _read(request, recipe)
    words = None if request.tokenizer is None else Tokenizer.checked(request.tokenizer)
    if words is not None:
        draft.input["kind"] = "text"
    if "max_steps" not in {**draft.input, **recipe.tables.get("input", {})}:
        draft.notes.append(f"input.max_steps is {DEFAULT_STEPS}, which neither the checkpoint nor a recipe says")
    model = model_spec(draft, request.name, recipe.tables)
    _report(draft, say)
    weights = tensors(draft, model)
    # A folded table is rounded to the precision of the model, and the comparison is about the weights.
    encoder = Encoder(model.model_copy(update={"fold": "never"}), weights, torch.device("cpu"))
    found = _compare(request, encoder, draft, recipe, words, say)
    compared = set() if found is None else {one.name for one in found.differences if not one.name.startswith(STATE)}
    # Outputs of every step prove the layers and no head, and numbers before the answer prove no kind.
    open_parts = (
        "head" if compared == {"sequence"} else "head.kind" if compared <= {"sequence", "embedding", "logits"} else None
    )
    unproven = [text for text in draft.assumed if not compared or (open_parts and text.startswith(open_parts))]
    if unproven and not request.assume:
        reason = "Nothing was written: the outputs depend on more than the checkpoint says. --assume takes it as it is here"
        raise draft.refusal(reason, unproven)
    for text in unproven:
        say(f"assumed: {text}")
    digest = spec.digest(read_file(request.checkpoint))
    content = card(request.name, draft, request.checkpoint.name, digest, unproven, found, request.tolerance)
    folder = write_version(settings.written_models, model, weights, content, words.definition.decode() if words else None)
    say(f"{folder} is complete.")
    say(f"Serve it: seqserve serve --models {shlex.quote(str(settings.written_models))}")
    return folder


def known_layers(format: str) -> list[str]:
    """Return the names of the layers or operators of a format that can be imported."""
    module, table = LAYER_TABLES[format]
    return sorted(getattr(_reader(f"{format}.{module}"), table), key=str.lower)


def _format(request: ImportRequest) -> str:
    if not request.checkpoint.is_file():
        raise ImportRefused(f"{request.checkpoint} is not a file: name the checkpoint")
    known = request.format or BY_SUFFIX.get(request.checkpoint.suffix)
    if known is None:
        raise ImportRefused(f"the name {request.checkpoint.name} does not tell the format: add --format {'|'.join(FORMATS)}")
    return known


def _read(request: ImportRequest, recipe: Recipe) -> Draft:
    """Return the model in a checkpoint. Only tensors of PyTorch and of TensorFlow 1 come without the layers that they belong to."""
    checkpoint, format = request.checkpoint, _format(request)
    has_tensors_only = format == "pytorch" and not has_code(checkpoint)
    if request.weights is not None and not has_tensors_only:
        raise ImportRefused(f"--weights is {request.weights}, and {checkpoint} is no state_dict of PyTorch: leave it out")
    try:
        if has_tensors_only:
            return pytorch.read(checkpoint, recipe, request.weights)
        if format == "tensorflow1":
            return tensorflow1.read(checkpoint, recipe)
    except UNFIT as error:
        raise ImportRefused(f"{checkpoint}: its tensors make no layers ({type(error).__name__}: {error})") from error
    format = "torch_archive" if format == "pytorch" else format
    if recipe.layers or recipe.dense or recipe.head_from is not None:
        raise ImportRefused(
            f"a checkpoint of {format} says what its layers are: remove [[layers]], [[head.dense]] and `from` from the recipe"
        )
    draft: Draft = _reader(format).read(checkpoint)
    answer_as(draft, recipe.head.get("kind"))
    return draft


def _reader(module: str) -> ModuleType:
    """Import a module of the readers; raises ImportRefused if a package is missing."""
    try:
        return import_module(f"service.importers.{module}")
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise ImportRefused(f"the package {error.name} is missing: install seqserve[import]") from error


def _report(draft: Draft, say: Callable[[str], None]) -> None:
    """Report the layers that were found in the checkpoint, and the tensors that were not used."""
    say(f"{draft.source}:")
    modules = Counter((name.rpartition(".")[0] or name, became) for name, became in draft.used.items())
    for (module, became), count in modules.items():
        say(f"  {module} ({count} tensor{'s' * (count > 1)}) -> {became}")
    for name in draft.unused:
        say(f"  {name} is not used")
    for note in draft.notes:
        say(f"note: {note}")


def _compare(
    request: ImportRequest, encoder: Encoder, draft: Draft, recipe: Recipe, words: Tokenizer | None, say: Callable[[str], None]
) -> SourceComparison | None:
    """Return the differences from the expected outputs, or from the source itself; raises ImportRefused if one exceeds the tolerance."""
    if request.check is not None:
        arrays = read_npz(request.check)
        found = SourceComparison(differences(encoder, arrays, words), f"the samples in `{request.check.name}`")
        if draft.assumed and np.diff(read_batch(encoder.spec, arrays, words).offsets).max(initial=0) < 2:
            raise draft.refusal(f"no sequence in {request.check.name} has two steps, as a comparison needs")
    else:
        try:
            if draft.original is None:
                raise NotCompared(f"nothing that is installed runs the source{RUNNERS.get(draft.source, '')}")
            found = compare_with_original(encoder, draft, draft.original, recipe.head)
        except NotCompared as reason:
            say(f"The outputs were not compared with those of the source, because {reason}: add --check FILE.npz.")
            return None
    for line in table(found.differences):
        say(line)
    wrong = [one for one in found.differences if not one.largest <= request.tolerance]
    if wrong:
        padded = "" if request.check is None else ", and add `lengths` if the samples are padded"
        raise draft.refusal(
            f"{', '.join(one.name for one in wrong)}: the largest difference is {max(one.largest for one in wrong):.2g}, and --tolerance "
            f"is {request.tolerance:g}. Nothing was written. Check what the recipe says of activations, padding and pools{padded}"
        )
    say(f"The outputs agree for {found.source}.")
    return found

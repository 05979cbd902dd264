"""Converts the tensors of a module to a layer: gates in the order of model.toml, matrices with inputs as rows, one bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from service.importers.draft import Array, ImportQuestion, ImportRefused, Part
from service.importers.ends import Table
from service.importers.pytorch.modules import ModuleTensors
from service.modeling.layers import GATED

DIRECTIONS = (("forward", ""), ("backward", "_reverse"))
ATTENTION = {"query", "weight", "bias", "weight_g", "weight_v"}


def recurrent(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """torch.nn.RNN, GRU or LSTM, or a cell. Gate orders are as in model.toml, and a GRU keeps the recurrent bias of its new gate."""
    module = _only(table, found)
    suffixes = _levels(module)
    bidirectional = "_l0_reverse" in suffixes
    if (bidirectional, module.kind) != (table.get("bidirectional", bidirectional), table["kind"]):
        raise ImportRefused(
            f"{module.name} is a {module.kind}{' in both directions' * bidirectional}, and the recipe says otherwise"
        )
    first = "" if suffixes == [""] else "_l0"
    names = {leaf.removesuffix(first) for leaf in module.tensors if leaf.endswith(first)}
    whole = {name + suffix for name in names for suffix in suffixes} == module.tensors.keys()
    if not whole or len(suffixes) % (1 + bidirectional) or len(names & {"bias_ih", "bias_hh"}) == 1:
        raise ImportRefused(
            f"{module.name or 'the model'} lacks tensors: each level has the same in each direction, two biases or none, "
            f"and it has {list(module.tensors)}"
        )
    arrays: dict[str, Array] = {}
    for level in range(len(suffixes) // (1 + bidirectional)):
        for direction, suffix in DIRECTIONS[: 1 + bidirectional]:
            own = direction if bidirectional else table.get("direction", "forward")
            suffix = "" if suffixes == [""] else f"_l{level}{suffix}"
            arrays |= {f"{level}.{own}.{name}": array for name, array in _one_direction(module, suffix).items()}
    projection = module.tensors.get(f"weight_hr{first}")
    hidden = module.tensors[f"weight_hh{first}"].shape[1] if projection is None else projection.shape[1]
    sizes = {"hidden": hidden, "depth": len(suffixes) // (1 + bidirectional), "bidirectional": bidirectional}
    return Part({**table, **sizes} | ({} if projection is None else {"projection": len(projection)}), arrays)


def _levels(module: ModuleTensors) -> list[str]:
    return [leaf.removeprefix("weight_hh") for leaf in module.tensors if leaf.startswith("weight_hh")]


def _one_direction(module: ModuleTensors, suffix: str) -> dict[str, Array]:
    tensors = module.tensors
    wide = tensors[f"weight_ih{suffix}"].T
    zeros = np.zeros(wide.shape[1], np.float32)
    from_input, from_hidden = (tensors.get(f"bias_{side}{suffix}", zeros) for side in ("ih", "hh"))
    arrays = {"input": wide, "recurrent": tensors[f"weight_hh{suffix}"].T}
    arrays |= GATED[module.kind].joined_biases(from_input, from_hidden, keeps_last=module.kind == "gru")
    projection = tensors.get(f"weight_hr{suffix}")
    return arrays if projection is None else {**arrays, "projection": projection.T}


def embedding(table: Table, found: Sequence[ModuleTensors]) -> Part:
    weight = _only(table, found).weight
    return Part({**table, "width": weight.shape[1]}, {"weight": weight})


def dense(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """torch.nn.Linear."""
    module = _only(table, found)
    if module.kind != "matrix":
        raise ImportRefused(f"{module.name} is no linear layer, and the recipe says otherwise")
    weight = module.weight.T
    return Part({**table, "width": weight.shape[1]}, {"weight": weight, "bias": module.bias(weight.shape[1])})


def attention(found: Sequence[ModuleTensors]) -> dict[str, Array]:
    """The attention of a head: a `query` or a linear layer with one output, and a linear layer with tanh before it if there is one."""
    queries = [module.tensors["query"] for module in found if "query" in module.tensors]
    linear = [module for module in found if module.tensors.keys() - {"query"}]
    if not queries and linear and linear[-1].kind == "matrix" and len(linear[-1].weight) == 1:
        queries.append(linear.pop().weight)  # its bias adds the same number to the score of every step
    if len(queries) != 1 or len(linear) > 1 or any(not module.tensors.keys() <= ATTENTION for module in linear):
        raise ImportQuestion(
            f"{', '.join(module.name for module in found)} make no attention pool, which has a `query` or a linear layer with one "
            "output, and at most one linear layer before it: name its modules with attention_from"
        )
    arrays = {"attention.query": queries[0].ravel()}
    if linear:
        weight = linear[0].weight.T
        arrays |= {"attention.weight": weight, "attention.bias": linear[0].bias(weight.shape[1])}
    return arrays


def _convolution(module: ModuleTensors, *, weight_norm: bool) -> dict[str, Array]:
    """Return the filters and the bias. weight_norm: keep the weight norm, which is computed otherwise."""
    filters = module.filters
    bias = module.bias(filters.shape[2])
    if not weight_norm:
        return {"filters": filters, "bias": bias}
    direction = module.tensors["weight_v"].transpose(2, 1, 0)
    return {"direction": direction, "magnitude": module.tensors["weight_g"].ravel(), "bias": bias}


def conv(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """torch.nn.Conv1d, and the batch norm that the recipe names after it."""
    module, *norms = found
    filters = module.filters
    arrays = _convolution(module, weight_norm=bool(table.get("weight_norm")))
    gated = table.get("activation") in ("glu", "gated_tanh")
    sizes: Table = {"filters": filters.shape[2] // (2 if gated else 1), "width": len(filters)}
    if norms:
        sizes["batch_norm"] = True
        arrays["norm"] = _statistics(norms[0])
    return Part({**table, **sizes}, arrays)


def text_cnn(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """Convolutions of several widths over the same steps."""
    arrays: dict[str, Array] = {}
    for module in found:
        filters = module.filters
        if f"{len(filters)}.filters" in arrays:
            raise ImportRefused(f"two convolutions have the width {len(filters)}: a text_cnn has one of each width")
        arrays |= {f"{len(filters)}.filters": filters, f"{len(filters)}.bias": module.bias(filters.shape[2])}
    widths = [len(module.filters) for module in found]
    counts = {module.filters.shape[2] for module in found}
    if len(counts) != 1:
        raise ImportRefused(f"the convolutions have {sorted(counts)} filters: a text_cnn has as many of each width")
    return Part({**table, "widths": widths, "filters": counts.pop()}, arrays)


def tcn(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """Levels of two causal convolutions, with a convolution of width 1 around them where the width changes (Bai et al. 2018)."""
    arrays: dict[str, Array] = {}
    remaining, level = list(found), 0
    while remaining:
        if len(remaining) < 2:
            raise ImportRefused(f"{remaining[0].name} stands alone: a level of a tcn has two convolutions")
        pair = [remaining.pop(0), remaining.pop(0)]
        for position, module in enumerate(pair):
            own = _convolution(module, weight_norm=bool(table.get("weight_norm")))
            arrays |= {f"{level}.{position}.{name}": array for name, array in own.items()}
        width, inputs, filters = pair[0].filters.shape
        if remaining and len(remaining[0].filters) == 1 and (width > 1 or inputs != filters):
            projection = remaining.pop(0)
            arrays[f"{level}.projection.filters"] = projection.filters
            arrays[f"{level}.projection.bias"] = projection.bias(projection.filters.shape[2])
        level += 1
    return Part({**table, "levels": level, "filters": filters, "width": width}, arrays)


def batch_norm(table: Table, found: Sequence[ModuleTensors]) -> Part:
    return Part(dict(table), {"norm": _statistics(_only(table, found))})


def layer_norm(table: Table, found: Sequence[ModuleTensors]) -> Part:
    module = _only(table, found)
    return Part(dict(table), {"norm": np.stack((module.weight, module.bias(len(module.weight))))})


def sru(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """The `sru` and `pytorch-sru` packages: the columns of a unit stand side by side there, and each block is one matrix here."""
    cells = [module for module in found if module.kind == "sru"]
    norms = {module.name.rpartition(".")[0]: module for module in found if module.kind == "layer_norm"}
    if len(cells) + len(norms) != len(found):
        other = next(module for module in found if module.kind not in ("sru", "layer_norm"))
        raise ImportRefused(f"{other.name} is a module of its own within the SRU: import it as a layer before it")
    if not table.keys() >= {"bidirectional", "activation"}:
        raise ImportQuestion('add "bidirectional" and "activation" to the sru layer of the recipe: its shapes tell neither')
    bidirectional = bool(table["bidirectional"])
    hidden = len(cells[0].tensors["bias"]) // 2 // (1 + bidirectional)
    arrays: dict[str, Array] = {}
    scales, projections = set(), set()
    for level, cell in enumerate(cells):
        cell.tensors.setdefault("weight_c", np.zeros_like(cell.tensors["bias"]))
        cell.tensors.setdefault("scale_x", np.ones(1, np.float32))
        arrays |= _sru_level(level, cell, _directions(table, bidirectional), hidden)
        if not table.get("cell_gates", True):  # as in version 1 of the package
            if cell.tensors["weight_c"].any():
                raise ImportRefused(f"{cell.name}.weight_c is not zero, and cell_gates is false in the recipe: remove it")
            arrays = {name: array for name, array in arrays.items() if not name.endswith(".cell")}
        blocks = cell.tensors["weight"].shape[1] // (hidden * (1 + bidirectional))
        scales |= {cell.tensors["scale_x"].ravel()[0]} if blocks == 3 else set()
        projections |= {cell.tensors["weight_proj"].shape[1]} if "weight_proj" in cell.tensors else set()
        norm = norms.get(cell.name)
        if norm is not None:
            arrays[f"{level}.norm"] = np.stack((norm.tensors["weight"], norm.tensors["bias"]))
    if len(scales) > 1 or len(projections) > 1:
        raise ImportRefused(
            "the levels of the SRU have different scales or projections: import each level as a layer of its own"
        )
    keys: Table = {"hidden": hidden, "depth": len(cells), "bidirectional": bidirectional}
    scale = min(scales, default=np.float32(table.get("scale", 1.0)))
    keys |= {} if scale == np.float32(table.get("scale", 1.0)) else {"scale": float(scale)}
    keys |= {"projection": projections.pop()} if projections else {}
    keys |= {"layer_norm": table.get("layer_norm", "before")} if norms else {}
    return Part({**table, **keys}, arrays)


def _directions(table: Table, bidirectional: bool) -> tuple[str, ...]:
    """Return the directions of a module in model.toml. The file does not tell whether a single direction reads reversed steps."""
    return ("forward", "backward") if bidirectional else (table.get("direction", "forward"),)


def _sru_level(level: int, cell: ModuleTensors, names: Sequence[str], hidden: int) -> dict[str, Array]:
    weight = cell.tensors["weight"]
    directions = len(names)
    blocks = weight.shape[1] // (directions * hidden)
    units = weight.reshape(len(weight), directions, hidden, blocks)
    arrays: dict[str, Array] = {}
    for index, direction in enumerate(names):
        place = f"{level}.{direction}"
        arrays[f"{place}.input"] = units[:, index].transpose(0, 2, 1).reshape(len(weight), blocks * hidden)
        arrays[f"{place}.bias"] = cell.tensors["bias"].reshape(2, directions, hidden)[:, index].ravel()
        arrays[f"{place}.cell"] = cell.tensors["weight_c"].reshape(2, directions, hidden)[:, index].ravel()
        if "weight_proj" in cell.tensors:
            arrays[f"{place}.projection"] = cell.tensors["weight_proj"]
    return arrays


def qrnn(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """The QRNN of Salesforce and fastai. Its forget gate is the update gate, the opposite of the forget gate here: its sign changes."""
    arrays: dict[str, Array] = {}
    sizes: Table = {}
    inputs = 0
    for level, module in enumerate(found):
        weight, pooling = module.weight, table.get("pooling", "fo")
        blocks = {"f": 2, "fo": 3}.get(pooling, 0)
        if not blocks:
            raise ImportRefused(f'pooling is {pooling!r}: the package has "f" (without output gate) and "fo"')
        hidden = len(weight) // blocks
        window = weight.shape[1] // inputs if level else int(table.get("window", 1))
        taps = weight.reshape(blocks, hidden, window, -1).transpose(2, 3, 0, 1).copy()
        bias = module.bias(len(weight)).reshape(blocks, hidden).copy()
        taps[:, :, 1], bias[1] = -taps[:, :, 1], -bias[1]
        place = f"{level}.{_directions(table, False)[0]}"
        arrays[f"{place}.input"] = taps.reshape(window, taps.shape[1], blocks * hidden)
        arrays[f"{place}.bias"] = bias.ravel()
        inputs = hidden
        if level and window != sizes["window"]:
            raise ImportRefused("the levels of the QRNN have different windows: import each level as a layer of its own")
        sizes = {"hidden": hidden, "window": window, "pooling": pooling, "depth": level + 1}
    return Part({**table, **sizes}, arrays)


def mingru(table: Table, found: Sequence[ModuleTensors]) -> Part:
    """Levels of minGRU-pytorch. Its gate is the gate of the new value, the opposite of the forget gate here: its sign changes."""
    arrays: dict[str, Array] = {}
    for level, module in enumerate(found):
        if module.kind != "mingru":
            raise ImportRefused(f"{module.name} is no minGRU, and the recipe says otherwise: import it as a layer of its own")
        wide, hidden = module.weight.T.copy(), len(module.weight) // 2
        bias = module.bias(2 * hidden).copy()
        wide[:, hidden:], bias[hidden:] = -wide[:, hidden:], -bias[hidden:]
        place = f"{level}.{_directions(table, False)[0]}"
        arrays |= {f"{place}.input": wide, f"{place}.bias": bias}
    return Part({**table, "hidden": hidden, "depth": len(found)}, arrays)


def _statistics(module: ModuleTensors) -> Array:
    size = len(module.tensors["running_mean"])
    gain, offset = module.tensors.get("weight", np.ones(size, np.float32)), module.bias(size)
    return np.stack((gain, offset, module.tensors["running_mean"], module.tensors["running_var"]))


def _only(table: Table, found: Sequence[ModuleTensors]) -> ModuleTensors:
    if len(found) != 1:
        names = ", ".join(module.name for module in found)
        raise ImportQuestion(f"the {table['kind']} layer needs one module, and its name fits {names}: make `from` longer")
    return found[0]


CONVERTERS: dict[str, Callable[[Table, Sequence[ModuleTensors]], Part]] = {
    "rnn": recurrent,
    "gru": recurrent,
    "lstm": recurrent,
    "embedding": embedding,
    "dense": dense,
    "conv": conv,
    "text_cnn": text_cnn,
    "tcn": tcn,
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "sru": sru,
    "qrnn": qrnn,
    "mingru": mingru,
}
"""The function for each kind of layer that has tensors."""

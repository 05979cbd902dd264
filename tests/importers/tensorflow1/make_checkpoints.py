"""Writes the folder `checkpoints`: `TF_USE_LEGACY_KERAS=1 python -m tests.importers.tensorflow1.make_checkpoints`.

It needs tensorflow-cpu 2.21.0 and tf_keras 2.21.0 in a separate environment, which is too large for every test run. They have the cells
of TensorFlow 1 in tensorflow.compat.v1, except the cells of tf.contrib.cudnn_rnn: its LSTM is BasicLSTMCell without a forget bias, and its
GRU is rewritten here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.importers.tensorflow1.cases import CASES, FEATURES, LENGTHS, UNITS, VOCABULARY, Case

tf: Any = import_module("tensorflow").compat.v1
legacy_cells: Any = import_module("tf_keras.src.layers.rnn.legacy_cells")
FOLDER = Path(__file__).resolve().parent / "checkpoints"
Tensor = Any


class CudnnCompatibleGRUCell(legacy_cells.GRUCell):  # type: ignore[misc]
    """As tf.contrib.cudnn_rnn had it: the candidate's two products have separate biases, and are separate variables."""

    def build(self, inputs_shape: Any) -> None:
        inputs, units = inputs_shape[-1], self._num_units
        self._gate_kernel = self.add_weight(name="gates/kernel", shape=[inputs + units, 2 * units])
        self._gate_bias = self.add_weight(name="gates/bias", shape=[2 * units])
        self._input_kernel = self.add_weight(name="candidate/input_projection/kernel", shape=[inputs, units])
        self._input_bias = self.add_weight(name="candidate/input_projection/bias", shape=[units])
        self._hidden_kernel = self.add_weight(name="candidate/hidden_projection/kernel", shape=[units, units])
        self._hidden_bias = self.add_weight(name="candidate/hidden_projection/bias", shape=[units])
        self.built = True

    def call(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gates = tf.sigmoid(tf.matmul(tf.concat([inputs, state], 1), self._gate_kernel) + self._gate_bias)
        reset, update = tf.split(gates, 2, axis=1)
        from_state = tf.matmul(state, self._hidden_kernel) + self._hidden_bias
        candidate = tf.tanh(tf.matmul(inputs, self._input_kernel) + self._input_bias + reset * from_state)
        new = (1 - update) * candidate + update * state
        return new, new


class Graph:
    """The parts of the graphs of the cases."""

    def cell(self, kind: str, **options: Any) -> Any:
        if kind == "CudnnCompatibleLSTMCell":
            return legacy_cells.BasicLSTMCell(UNITS, forget_bias=0.0, name="cudnn_compatible_lstm_cell")
        if kind == "CudnnCompatibleGRUCell":
            return CudnnCompatibleGRUCell(UNITS, name="cudnn_compatible_gru_cell")
        return getattr(legacy_cells, kind)(UNITS, **options)

    def levels(self, cells: list[Any]) -> Any:
        return legacy_cells.MultiRNNCell(cells)

    def steps(self, cell: Any, x: Tensor) -> Tensor:
        return tf.nn.dynamic_rnn(cell, x, dtype=tf.float32)[0]

    def last(self, cell: Any, x: Tensor) -> Tensor:
        return self.steps(cell, x)[:, -1]

    def both(self, make: Callable[[], Any], x: Tensor) -> Tensor:
        return tf.concat(tf.nn.bidirectional_dynamic_rnn(make(), make(), x, dtype=tf.float32)[0], -1)

    def stack_of_both(self, make: Callable[[], Any], x: Tensor, levels: int) -> Tensor:
        """As tf.contrib.rnn.stack_bidirectional_dynamic_rnn."""
        with tf.variable_scope("stack_bidirectional_rnn"):
            for level in range(levels):
                with tf.variable_scope(f"cell_{level}"):
                    x = self.both(make, x)
        return x

    def embedded(self, ids: Tensor) -> Tensor:
        return tf.nn.embedding_lookup(tf.get_variable("words", [VOCABULARY, FEATURES]), ids)

    def dense(self, x: Tensor, units: int, name: str, activation: str = "linear") -> Tensor:
        with tf.variable_scope(name):
            kernel, bias = tf.get_variable("kernel", [x.shape[-1], units]), tf.get_variable("bias", [units])
        y = tf.tensordot(x, kernel, 1) + bias
        return tf.nn.relu(y) if activation == "relu" else y


def main() -> None:
    warnings.simplefilter("ignore")
    tf.disable_eager_execution()
    FOLDER.mkdir(exist_ok=True)
    for index, (name, case) in enumerate(CASES.items()):
        with tf.Graph().as_default(), tf.Session() as session:
            variables, samples = run(session, case, np.random.default_rng(index))
        np.savez(FOLDER / name, **variables)
        np.savez(FOLDER / f"samples_{name}", **samples)


def run(session: Any, case: Case, random: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the variables of a graph with random values, and its outputs for random sequences."""
    x = tf.placeholder(tf.int32, [None, None]) if case.has_ids else tf.placeholder(tf.float32, [None, None, FEATURES])
    y = case.build(Graph(), x)
    variables = {}
    for variable in tf.global_variables():
        variables[variable.name.removesuffix(":0")] = values = random.normal(size=variable.shape).astype(np.float32) * 0.5
        variable.load(values, session)
    rows = [
        random.integers(0, VOCABULARY, size=length, dtype=np.int32)
        if case.has_ids
        else random.normal(size=(length, FEATURES)).astype(np.float32)
        for length in LENGTHS
    ]
    outputs = [session.run(y, {x: row[None]})[0] for row in rows]
    joined = np.concatenate(outputs) if outputs[0].ndim == 2 else np.stack(outputs)
    return variables, {
        "ids" if case.has_ids else "inputs": np.concatenate(rows),
        "offsets": np.cumsum([0, *LENGTHS]),
        "output": joined,
    }


if __name__ == "__main__":
    main()

"""Graphs of operations as chains of layers, for every source whose checkpoint is a graph.

A source translates its operators into `operations` on `signal.Signal`s. A signal knows by meaning what a tensor of the graph holds:
`nodes` that become layers of model.toml. `settling` names what several operations compute together, `joining` finds one node where the
graph has several, and `finishing` writes the model.
"""

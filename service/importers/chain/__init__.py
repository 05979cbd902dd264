"""Turns graphs of operations into chains of layers, for every source with a graph in its checkpoint.

A source translates its operators into `operations`, `combining` and `recurrent` on `signal.Signal`s. A signal records which columns a
tensor of the graph holds, and which `nodes` computed them; the nodes become layers of model.toml. `settling` names the function that
several operations compute together, `joining` finds one node where the graph has several, and `finishing` writes the model.
"""

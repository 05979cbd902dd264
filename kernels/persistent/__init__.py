"""The kernels of the LSTM and the GRU for CUDA: one persistent launch for all steps of a layer. The recurrent
weights never move. The families describe their layers to it; nothing here knows their weights."""

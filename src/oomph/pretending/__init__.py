"""Pretend to have a GPU: meta tensors to rehearse on, or CPU tensors with a memory budget.

Both install cuda.py, the one stand-in for torch.cuda, and factories.py. Rehearsing uses tensors,
streams, autocast, branches, recurrent, kernels, ops, values, sparse and ranks. Emulating uses card
(its memory), memory_stats, card_history and emulated.
"""

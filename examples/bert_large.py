"""BERT-large on sequences of 512 tokens: the model of the table on Hugging Face's page on one GPU.

oomph plan examples/bert_large.py:workload --gpu v100-16gb
"""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification

import oomph

CONFIG = BertConfig(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
)

workload = oomph.Workload(
    model=lambda: BertForSequenceClassification(CONFIG),
    batch=lambda n: {
        "input_ids": torch.zeros(n, 512, dtype=torch.long),
        "labels": torch.zeros(n, dtype=torch.long),
    },
    loss=lambda model, batch: model(**batch).loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-5),
    batch_size=64,
)

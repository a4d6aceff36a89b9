"""What a rehearsal costs, beside torch's own MemTracker on the same model in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.tables import Measured, as_table
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.child import in_a_child

FLOOR = "oomph, BERT-large, micro-batch 4, two steps (floor)"


def measure() -> str:
    rows = [
        Measured(FLOOR, min(in_a_child(rehearse(bert_large, "fp32")) for _ in range(3))),
        Measured("oomph, BERT-large, bf16 autocast", in_a_child(rehearse(bert_large, "bf16"))),
        Measured("oomph, Llama 70B, pure bf16", in_a_child(rehearse(llama_70b, "pure-bf16", 2))),
        Measured("MemTracker, BERT-large, two steps", in_a_child(mem_tracker)),
    ]
    return as_table("a rehearsal, without starting Python and torch", FLOOR, rows)


def rehearse(make: Callable[[], Workload], precision: Any, micro_batch: int = 4) -> Any:
    def work() -> float:
        from oomph.rehearsing.rehearse import prepare
        from oomph.rehearsing.rehearse import rehearse as run

        workload = make()
        prepare((8, 0))
        began_s = time.process_time()
        run(workload, Variant(micro_batch=micro_batch, precision=precision), (8, 0))
        return (time.process_time() - began_s) * 1000

    return work


def bert_large() -> Workload:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return Workload(
        model=lambda: BertForSequenceClassification(config),
        batch=lambda n: {
            "input_ids": torch.zeros(n, 512, dtype=torch.long),
            "labels": torch.zeros(n, dtype=torch.long),
        },
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=4,
    )


def llama_70b() -> Workload:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    )
    return Workload(
        model=lambda: LlamaForCausalLM(config),
        batch=lambda n: {
            name: torch.zeros(n, 4096, dtype=torch.long) for name in ("input_ids", "labels")
        },
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=2,
    )


def mem_tracker() -> float:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    workload = bert_large()
    with FakeTensorMode():
        model = workload.model()
        optimizer = workload.optimizer(model.parameters())
        began_s = time.process_time()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                workload.loss(model, workload.batch(4)).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    return (time.process_time() - began_s) * 1000

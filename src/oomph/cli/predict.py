"""`oomph predict`: a workload or script -> memory and time of a training step."""

from __future__ import annotations

import argparse

from oomph.cli.arguments import (
    add_cluster,
    add_keeps,
    add_lora,
    add_workload_and_gpu,
    asked_again,
    positive,
    print_json,
    what_to_train,
)
from oomph.errors import EXIT_NO, EXIT_UNCERTAIN, EXIT_YES, UsageError

TYPE_CHECKING = False  # see oomph/__init__.py
if TYPE_CHECKING:
    from typing import Any

DESCRIPTION = """\
Rehearse two training steps on tensors that take no memory, and predict their peak
memory and time on a GPU. Nothing is trained and no GPU is needed."""

EXAMPLES = """\
examples:
  oomph predict train.py --gpu rtx4090 -- --epochs 3
  oomph predict -m package.train --gpu a100-40gb --micro-batch 8 -- --config base.yaml
  oomph predict train.py:workload --gpu v100-16gb
  oomph predict train.py:workload --gpu rtx4090 --micro-batch 4 --precision bf16
  oomph predict train.py:workload --gpu-memory 12GiB --checkpointing blocks
  oomph predict hf:meta-llama/Llama-3.1-8B --seq-len 4096 --batch-size 8 --gpu h100
  oomph predict train.py:workload --gpu rtx4090 --micro-batch 8 --precision bf16 \\
    --measured-step 0.45s --measured-with micro-batch=4,precision=fp32
  oomph predict train.py:workload --gpu a100-80gb --gpus 8 --sharding fsdp
  oomph predict hf:meta-llama/Llama-3.1-8B --seq-len 8192 --batch-size 64 --gpu h100 \\
    --gpus 64 --tensor-parallel 8 --link infiniband-400 --precision bf16

A script runs unchanged, in a sandbox, up to its second optimizer step; put its own
arguments after --. With :NAME, train.py must define NAME as an oomph.Workload or a
function that returns one.

exit codes: 0 it fits; 1 it does not; 2 a wrong flag, or an error in your code;
3 uncertain; 4 a file cannot be read."""

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "pure-bf16")
_NEXT = {  # a verdict -> what to do with it
    "yes": "{again}  # is there a faster way?",
    "no": "{again}  # what makes it fit?",
    "uncertain": "{again}  # what fits for certain?",
}
_EXITS = {"yes": EXIT_YES, "no": EXIT_NO, "uncertain": EXIT_UNCERTAIN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_and_gpu(parser)
    parser.add_argument(
        "--micro-batch",
        type=positive,
        metavar="N",
        help="examples per forward pass (default: the workload's whole batch, or the script's)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="for a model by name: examples of one optimizer step (default: 8)",
    )
    parser.add_argument(
        "--precision",
        choices=_PRECISIONS,
        help="fp16 and bf16 mean autocast; pure-bf16 also keeps the weights in bf16 (default: fp32,"
        " or what the script uses)",
    )
    parser.add_argument(
        "--checkpointing",
        metavar="HOW",
        default="none",
        help="none (default), blocks (recompute all), every-2 (recompute every second block)",
    )
    parser.add_argument(
        "--optimizer",
        metavar="HOW",
        default="as-is",
        help="as-is (default), fused, foreach, for-loop or 8-bit; adafactor or sgd replace yours",
    )
    parser.add_argument(
        "--measured-step",
        type=_seconds,
        metavar="TIME",
        help="time of one optimizer step that you measured on that GPU, e.g. 0.45s or 450ms; the"
        " prediction is scaled to it",
    )
    parser.add_argument(
        "--measured-with",
        type=_settings,
        metavar="HOW",
        default={},
        help="settings of that measurement, e.g. micro-batch=4,precision=fp32,checkpointing=none"
        " (default: the settings given here)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="name each part of the error bar with its source"
    )
    _add_tricks(parser)


def _add_tricks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention",
        choices=("as-is", "sdpa"),
        default="as-is",
        help="sdpa: fused attention instead of eager",
    )
    parser.add_argument(
        "--loss",
        choices=("as-is", "chunked"),
        default="as-is",
        help="chunked: compute a language model's loss in pieces, never all logits at once",
    )
    parser.add_argument(
        "--optimizer-in-backward",
        action="store_true",
        help="update each parameter as soon as its gradient is ready, and free the gradient",
    )
    parser.add_argument(
        "--offload",
        action="append",
        choices=("activations", "optimizer", "zero"),
        default=[],
        help="keep these in host memory (may be given twice); zero is ZeRO-Offload: the optimizer"
        " with fp32 weights there, and 16-bit weights on the GPU",
    )
    parser.add_argument(
        "--adapters",
        choices=("none", "lora", "qlora"),
        default="none",
        help="train small adapters beside the frozen model",
    )
    add_lora(parser)
    parser.add_argument(
        "--channels-last",
        action="store_true",
        help="images as height x width x channels in memory, as tensor cores read them",
    )
    parser.add_argument(
        "--expandable-segments",
        action="store_true",
        help="predict for PYTORCH_ALLOC_CONF=expandable_segments:True",
    )
    parser.add_argument(
        "--gpus",
        type=positive,
        metavar="N",
        default=1,
        help="number of GPUs; --micro-batch is per GPU (default: 1)",
    )
    parser.add_argument(
        "--sharding",
        metavar="HOW",
        help="ddp (default: each holds all), fsdp (divided among all), hybrid (within groups)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        metavar="N",
        default=1,
        help="GPUs that share each layer of a transformer (default: 1); --sharding is then among"
        " groups of them",
    )
    add_cluster(parser)
    add_keeps(parser)


def run(options: argparse.Namespace) -> int:
    from oomph.progress import Progress
    from oomph.verbs.predict import predict

    trained = what_to_train(options)
    _check_batch_size(options)
    with Progress("starting torch") as say:
        prediction = predict(
            trained,
            gpu=options.gpu,
            gpu_memory=options.gpu_memory,
            micro_batch=options.micro_batch,
            precision=options.precision,
            checkpointing=options.checkpointing,
            num_gpus=options.gpus,
            sharding=options.sharding,
            tensor_parallel=options.tensor_parallel,
            gpus_per_node=options.gpus_per_node,
            link=options.link,
            optimizer=options.optimizer,
            measured_step_s=options.measured_step,
            **options.measured_with,
            attention=options.attention,
            loss=options.loss,
            optimizer_in_backward=options.optimizer_in_backward,
            offload=options.offload,
            adapters=options.adapters,
            lora_rank=options.lora_rank,
            lora_targets=options.lora_targets,
            channels_last=options.channels_last,
            expandable_segments=options.expandable_segments,
            keeps=options.keeps,
            unprotected=options.unprotected,
            fresh=options.fresh,
            say=say,
        )
    if options.json:
        print_json(prediction)
    else:
        from oomph.showing.predict import print_prediction

        then = _NEXT[prediction.fits].format(again=asked_again(options, "plan"))
        print_prediction(prediction, explains=options.explain, then=then)
    return _EXITS[prediction.fits]


def _check_batch_size(options: argparse.Namespace) -> None:
    if options.batch_size is not None and not str(options.workload).startswith("hf:"):
        raise UsageError(
            "--batch-size goes with a model by name",
            because="a script and a Workload have their own batch",
            attempt="--micro-batch, or oomph plan --batch-size",
        )


def _seconds(text: str) -> float:
    """Parse a time: 0.45, 0.45s and 450ms are equal."""
    written = text.strip().lower()
    scale = 0.001 if written.endswith("ms") else 1.0
    try:
        return float(written.removesuffix("ms").removesuffix("s")) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a time such as 0.45s") from None


def _settings(text: str) -> dict[str, Any]:
    """Parse micro-batch=4,precision=fp32 into arguments of `predict`."""
    import re

    found: dict[str, Any] = {}
    parts = re.split(r",(?=[^,]*=)", text.strip(" ,"))  # not the commas of checkpointing=blocks:0,3
    for part in filter(None, (part.strip() for part in parts)):
        name, _, value = (word.strip() for word in part.partition("="))
        argument = f"measured_{name.replace('-', '_')}"
        if name not in ("micro-batch", "precision", "checkpointing") or argument in found:
            raise argparse.ArgumentTypeError(
                f"{part!r:.80} is none of micro-batch=N, precision=NAME and checkpointing=HOW"
            )
        if name == "precision" and value not in _PRECISIONS:
            raise argparse.ArgumentTypeError(f"{value!r:.80} is none of {', '.join(_PRECISIONS)}")
        found[argument] = positive(value) if name == "micro-batch" else value
    return found

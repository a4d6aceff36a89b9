"""The example scripts: what each is called with, in small and as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One script: `python PROGRAM *arguments`, started in examples/scripts."""

    program: str  # "mnist_cnn.py", or a module with -m: "-m tagger.train"
    tiny: tuple[str, ...]  # trains for a few steps in about a second of CPU
    default: tuple[str, ...] = ()  # of a size for a GPU
    on_cpu: tuple[str, ...] = ()  # what must be added where there is no GPU
    needs_gpu: bool = False  # it says .cuda() whatever there is
    loss_falls: bool = True  # within the few steps of `tiny`


def _of(program: str, tiny: str, default: str = "", *, on_cpu: str = "", **more: bool) -> Command:
    return Command(
        program=program,
        tiny=tuple(tiny.split()),
        default=tuple(default.split()),
        on_cpu=tuple(on_cpu.split()),
        **more,
    )


COMMANDS = {
    "mnist_cnn": _of(
        "mnist_cnn.py", "--batch-size 16 --train-size 160 --epochs 1 --log-interval 1"
    ),
    "vae_cuda": _of(
        "vae_cuda.py", "--batch_size 8 --hidden 32 --latent 4 --steps 3", needs_gpu=True
    ),
    "pick_batch_by_gpu": _of(
        "pick_batch_by_gpu.py",
        "--vocab 64 --width 32 --layers 2 --heads 2 --length 16 --steps 21",
    ),
    "default_device": _of("default_device.py", "--width 32 --depth 2 --points 64 --steps 30"),
    "vit_bf16": _of(
        "vit_bf16.py",
        "--image 32 --patch 8 --dim 32 --depth 2 --heads 2 --batch 4 --steps 11",
        loss_falls=False,
    ),
    "unet_amp": _of(
        "unet_amp.py",
        "--epochs 3 --batch-size 2 --images 6 --size 32 --base 8 --amp --lr 1e-4",
        "--amp",
    ),
    "half_classifier": _of(
        "half_classifier.py", "--tokens 8 --dim 16 --depth 2 --batch 8 --iters 21 --lr 0.05"
    ),
    "compiled_llama": _of(
        "compiled_llama.py",
        "--vocab 100 --dim 32 --layers 2 --heads 2 --length 16 --batch-size 4 --steps 21"
        " --backend eager",
    ),
    "lstm_lm": _of(
        "lstm_lm.py",
        "--vocab 50 --emsize 16 --nhid 16 --bptt 5 --batch_size 4 --tokens 400 --epochs 2 --lr 0.02"
        " --dropout 0.0",
    ),
    "resnet_imagenet": _of(
        "resnet_imagenet.py",
        "--batch-size 8 --workers 1 --epochs 2 --layers 1,1,1,1 --width 8 --image-size 32"
        " --num-images 40 --print-freq 1 --lr 0.02",
    ),
    "nano_gpt": _of(
        "nano_gpt.py",
        "--compile=False --batch_size=2 --block_size=16 --n_layer=2"
        " --n_head=2 --n_embd=32 --vocab_size=256 --max_iters=4 --warmup_iters=0",
        on_cpu="--device=cpu",
    ),
    "dcgan": _of(
        "dcgan.py", "--batch_size 4 --images 40 --nz 8 --ngf 4 --ndf 4 --epochs 1", loss_falls=False
    ),
    "eval_first": _of(
        "eval_first.py",
        "--examples 80 --vocab 50 --dim 16 --heads 2 --layers 1 --length 16 --batch 8 --epochs 2",
    ),
    "hf_trainer": _of(
        "hf_trainer.py",
        "--output_dir out --n_embd 32 --n_layer 2 --n_head 2 --vocab_size 64 --block_size 16"
        " --num_blocks 16 --per_device_train_batch_size 2"
        " --max_steps 3 --logging_steps 1 --report_to none --save_strategy no --bf16"
        " --gradient_checkpointing --disable_tqdm True",
        "--output_dir out --per_device_train_batch_size 16 --report_to none"
        " --bf16 --gradient_checkpointing",
        on_cpu="--use_cpu",
        loss_falls=False,
    ),
    "lightning_resnet": _of(
        "lightning_resnet.py",
        "--width 4 --blocks 1 --batch_size 8 --size 40 --max_epochs 1",
        loss_falls=False,
    ),
    "accelerate_loop": _of(
        "accelerate_loop.py",
        "--vocab 40 --dim 16 --heads 2 --layers 1 --length 8 --batch_size 8 --examples 40"
        " --epochs 3 --lr 0.01",
    ),
    "train_from_config": _of(
        "train_from_config.py",
        "--config configs/audio_tiny.yaml",
        "--config configs/audio_base.yaml",
    ),
    "tagger": _of(
        "-m tagger.train",
        "--vocab 50 --tags 5 --dim 8 --hidden 8 --layers 1 --dropout 0 --longest 8 --sentences 80"
        " --batch-size 4 --epochs 2",
    ),
    "optimizer_before_cuda": _of(
        "optimizer_before_cuda.py", "users=50 items=20 dim=8 hidden=16 batch_size=32 steps=30"
    ),
    "tied_weights": _of(
        "tied_weights.py",
        "--vocab 60 --dim 16 --heads 2 --ff 32 --layers 1 --dropout 0 --length 8 --batch 4"
        " --steps 21",
    ),
    "checkpointed_transformer": _of(
        "checkpointed_transformer.py",
        "--vocab 50 --dim 16 --heads 2 --depth 2 --length 8 --batch-size 4 --max-steps 10"
        " --lr 0.01",
    ),
    "ddpm_ema": _of("ddpm_ema.py", "--channels 8 --image 8 --batch 4 --steps 4", loss_falls=False),
    "finetune_checkpoint": _of(
        "finetune_checkpoint.py",
        "--filters 8 --length 16 --batch-size 16 --epochs 3 --steps-per-epoch 15 --lr 0.01",
    ),
    "runs_and_checkpoints": _of(
        "runs_and_checkpoints.py",
        "--series 2 --hidden 8 --layers 2 --window 32 --batch-size 4 --steps 6",
        loss_falls=False,
    ),
    "trainer_class": _of(
        "trainer_class.py",
        "--rows 400 --features 8 --width 16 --depth 1 --batch-size 32 --max-iters 15",
    ),
    "sys_exit_main": _of(
        "sys_exit_main.py", "--width 4 --out 8 --size 16 --batch 8 --iters 12", loss_falls=False
    ),
    "clip_contrastive": _of(
        "clip_contrastive.py",
        "--image-width 8 --text-dim 16 --text-layers 1 --embed 8 --resolution 32 --context 8"
        " --batch 4 --iterations 21",
        loss_falls=False,
    ),
}

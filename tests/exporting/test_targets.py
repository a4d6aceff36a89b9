"""The exports against the libraries that they are for.

Each is skipped where its library is not installed; the development extras have them all.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from planning.plans import plan_of

from oomph.errors import UsageError
from oomph.records.workload import holds_parameters_on_host

SETTINGS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16", "checkpointing": "blocks", "optimizer": "fused"},
    {"precision": "fp16", "checkpointing": "every-2", "optimizer": "foreach"},
    {"precision": "pure-bf16", "checkpointing": "blocks:0,3"},
    {"optimizer": "8-bit", "offload_activations": True, "expandable_segments": True},
    {"optimizer": "adafactor", "checkpointing": "selective"},
    {"optimizer": "sgd", "offload_optimizer": True, "attention": "sdpa", "loss": "chunked"},
    {"sharding": "ddp", "num_gpus": 4, "precision": "bf16"},
    {"sharding": "fsdp", "num_gpus": 4, "precision": "bf16", "checkpointing": "blocks"},
    {"sharding": "fsdp", "num_gpus": 2, "checkpointing": "every-3", "offload_optimizer": True},
    {"sharding": "hybrid", "num_gpus": 8, "precision": "fp16", "adapters": "lora"},
]
every_way = pytest.mark.parametrize("settings", SETTINGS, ids=str)


class TestHuggingFace:
    @staticmethod
    def accepted(settings: dict[str, Any], tmp_path: Path) -> Any:
        """TrainingArguments as it takes them; on a CPU it wants to be told so."""
        pytest.importorskip("accelerate")
        from transformers import TrainingArguments

        return TrainingArguments(**{"output_dir": str(tmp_path), "use_cpu": True, **settings})

    @every_way
    def test_training_arguments_take_it(self, settings: dict[str, Any], tmp_path: Path) -> None:
        plan = plan_of(**settings)
        taken = self.accepted(plan.to_hf(), tmp_path)
        assert taken.per_device_train_batch_size == plan.micro_batch
        assert taken.gradient_accumulation_steps == plan.accumulate
        assert (taken.bf16, taken.fp16) == (plan.precision == "bf16", plan.precision == "fp16")
        is_sharded = plan.variant.sharding in ("fsdp", "hybrid")
        assert bool(taken.fsdp_plugin_args) == is_sharded
        if is_sharded:
            whole = plan.checkpointing == "blocks"
            assert taken.fsdp_plugin_args["activation_checkpointing"] == whole
            assert taken.fsdp_plugin_args["fsdp_version"] == 2

    def test_tf32_is_asked_for(self) -> None:
        assert plan_of(precision="tf32").to_hf()["tf32"] is True

    def test_the_users_own_are_kept_and_contradictions_overwritten(self) -> None:
        mine = {
            "learning_rate": 3e-4,
            "per_device_train_batch_size": 64,
            "gradient_accumulation_steps": 2,
            "bf16": True,
            "tf32": True,
            "auto_find_batch_size": True,
            "torch_compile": True,
            "torch_empty_cache_steps": 4,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True, "every_n_layers": 7},
            "deepspeed": "ds_config.json",
            "optim": "lion_32bit",
            "dataloader_pin_memory": False,
        }
        before = json.dumps(mine)
        planned = plan_of(checkpointing="every-2", optimizer="fused").to_hf(mine)
        assert json.dumps(mine) == before
        assert planned == {
            **mine,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 16,
            "bf16": False,
            "fp16": False,
            "tf32": False,
            "auto_find_batch_size": False,
            "gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
            "deepspeed": None,
        }

    def test_an_object_of_training_arguments_is_read_and_taken_again(self, tmp_path: Path) -> None:
        mine = self.accepted(
            {"learning_rate": 3e-4, "bf16": True, "optim": "adamw_torch", "report_to": "none"},
            tmp_path,
        )
        planned = plan_of(optimizer="fused").to_hf(mine)
        assert planned["learning_rate"] == 3e-4
        assert "weight_decay" not in planned  # as its class has it
        taken = self.accepted(planned, tmp_path)
        assert (taken.bf16, taken.optim, taken.report_to) == (False, "adamw_torch_fused", [])

    def test_the_trainer_recomputes_every_second_layer(self, tmp_path: Path) -> None:
        pytest.importorskip("accelerate")
        import torch
        from transformers import BertConfig, BertForSequenceClassification, Trainer

        config = BertConfig(
            hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8
        )
        model = BertForSequenceClassification(config)
        planned = plan_of(micro_batch=1, accumulation=2, checkpointing="every-2").to_hf()
        mine = {"max_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        example = {"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.tensor(0)}
        Trainer(
            model=model,
            args=self.accepted({**planned, **mine}, tmp_path),
            train_dataset=[example] * 4,
        ).train()
        layers = model.bert.encoder.layer
        assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False]

    def test_settings_of_another_kind_are_refused(self) -> None:
        with pytest.raises(UsageError, match="settings cannot be read from 'str'"):
            plan_of().to_hf("args")


class TestLightning:
    # Where Slurm is installed, Lightning says so.
    @pytest.mark.filterwarnings("ignore:The `srun` command is available")
    @every_way
    def test_the_trainer_takes_it(self, settings: dict[str, Any], tmp_path: Path) -> None:
        lightning = pytest.importorskip("pytorch_lightning")
        plan = plan_of(**settings)
        planned = plan.to_lightning({"max_epochs": 3, "precision": "64-true"})
        assert planned["max_epochs"] == 3
        # No GPU is here: the same arguments for CPUs, and what is CUDA's own is tried by itself.
        if planned["strategy"].startswith("fsdp"):
            from pytorch_lightning.strategies import StrategyRegistry

            assert planned["strategy"] in StrategyRegistry
            planned["strategy"] = "ddp"
        if planned["precision"] == "16-mixed":
            from pytorch_lightning.plugins import MixedPrecision

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.cuda.amp.GradScaler is enabled")
                MixedPrecision(planned["precision"], "cuda")
            planned["precision"] = "32-true"
        trainer = lightning.Trainer(
            **{**planned, "accelerator": "cpu"},
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        assert trainer.accumulate_grad_batches == plan.accumulate
        assert trainer.world_size == plan.gpus
        assert trainer.precision == planned["precision"]


class TestAccelerate:
    @every_way
    @pytest.mark.parametrize("ending", ["json", "yaml"])
    def test_the_launcher_reads_it(
        self, settings: dict[str, Any], ending: str, tmp_path: Path
    ) -> None:
        config_args = pytest.importorskip("accelerate.commands.config.config_args")
        plan = plan_of(**settings)
        mine = {"main_process_port": 29501, "mixed_precision": "fp8", "deepspeed_config": {"a": 1}}
        path = tmp_path / f"accelerate.{ending}"
        path.write_text(plan.to_accelerate(mine).text)
        read = config_args.load_config_from_file(str(path))
        assert read.num_processes == plan.gpus
        assert read.main_process_port == 29501
        assert not read.deepspeed_config
        assert read.mixed_precision == {"bf16": "bf16", "fp16": "fp16"}.get(plan.precision, "no")

    def test_the_launcher_starts_with_it(self, tmp_path: Path) -> None:
        launch = pytest.importorskip("accelerate.commands.launch")
        for settings in SETTINGS:
            path = tmp_path / "accelerate.yaml"
            path.write_text(plan_of(**settings).to_accelerate().text)
            arguments = ["--config_file", str(path), "train.py"]
            parsed = launch.launch_command_parser().parse_args(arguments)
            checked, _, _ = launch._validate_launch_command(parsed)
            assert checked.use_fsdp == (settings.get("sharding") in ("fsdp", "hybrid"))
            assert checked.num_processes == settings.get("num_gpus", 1)

    @every_way
    def test_an_accelerator_takes_the_arguments(self, settings: dict[str, Any]) -> None:
        accelerate = pytest.importorskip("accelerate")
        from accelerate.state import AcceleratorState

        arguments = plan_of(**settings).to_accelerate().arguments
        if arguments["mixed_precision"] == "fp16":
            # It refuses fp16 without a GPU; that it knows the name is what can be seen here.
            assert "fp16" in accelerate.utils.PrecisionType.list()
            arguments["mixed_precision"] = "no"
        AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(**arguments, cpu=True)
        assert accelerator.gradient_accumulation_steps == 16
        assert accelerator.mixed_precision == arguments["mixed_precision"]
        AcceleratorState._reset_state(True)


class TestDeepSpeed:
    @every_way
    def test_its_config_takes_it(
        self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime = self.runtime()
        plan = plan_of(**settings)
        mine = {
            "gradient_clipping": 1.0,
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"offload_param": {"device": "cpu"}, "overlap_comm": True},
        }
        # DeepSpeed multiplies by the processes that there are.
        monkeypatch.setattr(runtime.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(runtime.dist, "get_world_size", lambda *_: plan.gpus)
        monkeypatch.setattr(runtime.dist, "get_rank", lambda *_: 0)
        taken = runtime.DeepSpeedConfig(plan.to_deepspeed(mine))
        assert taken.train_batch_size == plan.batch_size
        assert taken.gradient_clipping == 1.0
        assert taken.zero_config.overlap_comm is True
        has_params = holds_parameters_on_host(plan.variant)
        assert (taken.zero_config.offload_param is not None) == has_params
        is_on_host = plan.variant.offload_optimizer or plan.variant.zero_offload
        assert (taken.zero_config.offload_optimizer is not None) == is_on_host
        assert taken.float16_config.enabled == (plan.precision == "fp16")
        assert taken.bfloat16_config.enabled == (plan.precision in ("bf16", "pure-bf16"))
        assert taken.zero_config.stage == 3 or plan.variant.sharding in ("none", "ddp")

    def test_it_refuses_another_batch(self) -> None:
        """That the test above can fail."""
        with pytest.raises(AssertionError, match="train_batch_size"):
            self.runtime().DeepSpeedConfig({**plan_of().to_deepspeed(), "train_batch_size": 63})

    @staticmethod
    def runtime() -> Any:
        with warnings.catch_warnings():  # its own imports are not ours to mend
            warnings.simplefilter("ignore")
            return pytest.importorskip("deepspeed.runtime.config")

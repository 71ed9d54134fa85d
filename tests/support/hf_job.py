"""A Hugging Face training of a tiny model on made-up token lists, as a person writes it; a script and a module.

python hf_job.py [--out weights.safetensors] [--steps N] [--lora] [--gpu]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

SAMPLES, LONGEST, WORDS = 44, 24, 61
"""The last step of an epoch of 8 samples a step has 4."""


def data(count: int = SAMPLES) -> list[dict[str, list[int]]]:
    """Token lists of unequal lengths, of which the first part is not learned."""
    random = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        length = int(torch.randint(4, LONGEST, (), generator=random))
        words = torch.randint(1, WORDS, (length,), generator=random).tolist()
        prompt = int(torch.randint(0, length - 1, (), generator=random))
        made.append({"input_ids": words, "labels": [-100] * prompt + words[prompt:]})
    return made


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)

    def rows(key: str, filler: int) -> torch.Tensor:
        return torch.tensor([sample[key] + [filler] * (width - len(sample[key])) for sample in samples])

    ids = rows("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": rows("labels", -100)}


def model(*, lora: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
    )
    made = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]))
        torch.manual_seed(1)
        for name, parameter in made.named_parameters():  # it begins at 0, and A would have no gradient
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return made


def arguments(out: Path, **changed: Any) -> TrainingArguments:
    return TrainingArguments(**settings(out, **changed))


def settings(out: Path, **changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 50,
        "learning_rate": 0.02,
        "warmup_steps": 4,
        "optim": "adamw_torch",
        "adam_epsilon": 1e-4,
        "max_grad_norm": 0.5,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return {**given, **changed}


def trained(kind: Any, out: Path, *, lora: bool = False, resume: Any = None, **changed: Any) -> Any:
    """A trainer of this kind that has trained."""
    trainer = kind(
        model=model(lora=lora), args=arguments(out, **changed), train_dataset=data(), data_collator=padded
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


ON_GPU: dict[str, Any] = {"use_cpu": not torch.cuda.is_available(), "bf16": True, "logging_steps": 1}


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("weights.safetensors"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="in bf16, on a GPU where there is one")
    asked = parser.parse_args()
    from potluck.integrations.transformers import Trainer

    print("ready", flush=True)  # for a test that waits until everything is imported
    changed = ON_GPU if asked.gpu else {}
    trainer = trained(Trainer, asked.out.parent / "out", lora=asked.lora, max_steps=asked.steps, **changed)
    save_file({name: w.contiguous() for name, w in weights(trainer).items()}, asked.out)
    print(f"trained {trainer.state.global_step} steps", file=sys.stderr)

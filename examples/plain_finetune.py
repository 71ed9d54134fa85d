"""A plain fine-tuning with the Hugging Face Trainer and LoRA: python examples/plain_finetune.py [--steps N]

examples/finetune.py is the same training on every machine you own. Compare the two files side by side.

Nothing is downloaded. So the base model has random weights, made from a configuration, and the text is made here:
counting, such as "8,9,10,11.". The model learns what follows the first number, and the samples differ in length.
"""

import argparse
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIGNS = " 0123456789,."
Sample = dict[str, list[int]]


def make_data(samples: int = 4000) -> list[Sample]:
    """Lists of tokens; the first number of each has no label (-100)."""
    numbers = random.Random(1)
    made = []
    for _ in range(samples):
        first, count = numbers.randrange(90), numbers.randrange(2, 8)
        text = ",".join(str(first + each) for each in range(count)) + "."
        given = text.index(",") + 1
        ids = [SIGNS.index(sign) for sign in text]
        made.append({"input_ids": ids, "labels": [-100] * given + ids[given:]})
    return made


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """One batch: all samples as long as the longest."""
    width = max(len(sample["input_ids"]) for sample in samples)

    def padded(key: str, filler: int) -> torch.Tensor:
        return torch.tensor([sample[key] + [filler] * (width - len(sample[key])) for sample in samples])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


def build() -> torch.nn.Module:
    """A frozen base, and adapters in all its linear layers. In place of from_pretrained(…)."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(SIGNS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    adapters = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    return get_peft_model(LlamaForCausalLM(config), adapters)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--out", default="finetuned")
asked = parser.parse_args()

trainer = Trainer(
    model=build(),
    args=TrainingArguments(
        asked.out,
        per_device_train_batch_size=32,
        max_steps=asked.steps,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=make_data(),
    data_collator=collate,
)
trainer.train()
trainer.save_model()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")

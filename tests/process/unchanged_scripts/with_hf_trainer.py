"""Hugging Face's Trainer on a small BERT with dropout. Writes to FILE what it got.

usage: with_hf_trainer.py FILE [plugin]
"""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 50, (length, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[0] % 2}


def main() -> None:
    set_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            learning_rate=1e-2,
        )
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=arguments,
            train_dataset=Sentences(96),
            eval_dataset=Sentences(20),
        )
        if sys.argv[2:] == ["plugin"]:
            from lockstep.plugins.accelerate import use_lockstep

            use_lockstep(trainer.accelerator)
        trainer.train()
        evaluation = trainer.evaluate()["eval_loss"]
    names = ("loss", "grad_norm", "learning_rate")
    losses = [[entry.get(name) for name in names] for entry in trainer.state.log_history if "loss" in entry]
    wrapped = trainer.model_wrapped
    if trainer.is_world_process_zero():
        found = {
            "losses": [*losses, evaluation],
            "state": trainer.model.state_dict(),
            "wrapper": f"{type(wrapped).__module__}.{type(wrapped).__name__}",
        }
        torch.save(found, sys.argv[1])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

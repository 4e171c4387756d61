"""Fine-tunes a causal language model with Hugging Face's Trainer and one line of offloadd.

    python examples/finetune_hf.py MODEL_FOLDER TEXT_FILE --pool /nvme0 --ram 8GiB

Kill it and start it again: it continues at the last step, with no checkpoint. OFFLOADD_DISABLE=1 trains in memory."""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import offloadd


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("text", help="a text file")
    parser.add_argument("--pool", required=True, help="a directory on a drive with direct I/O")
    parser.add_argument("--ram", default="8GiB", help="the memory budget of weights, gradients and optimizer state")
    parser.add_argument("--job", default="finetune")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", default="out")
    return parser.parse_args()


class Pieces(torch.utils.data.Dataset):
    def __init__(self, ids, length):
        self.pieces = [ids[at:at + length] for at in range(0, len(ids) - length, length)]

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, i):
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def main():
    given = parse()
    model = AutoModelForCausalLM.from_pretrained(given.model)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    with open(given.text, encoding="utf-8") as file:
        data = Pieces(tokenizer(file.read())["input_ids"], given.length)
    arguments = TrainingArguments(given.out, max_steps=given.steps, per_device_train_batch_size=1, learning_rate=1e-5, logging_steps=1,
                                  save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=data,
                      callbacks=[offloadd.TrainerCallback(nvme_path=given.pool, ram=given.ram, job=given.job)])
    trainer.train()
    trainer.save_model(given.out)


if __name__ == "__main__":
    main()

"""examples/*.py, as somebody would start them: offloaded and with OFFLOADD_DISABLE=1 they say the same."""

import os
import sys

from battery import case, main
from programs import Programs

ONE = {"types": ("fp32",), "memory": ("floor",)}
EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples")


def said_by(run, example, *arguments):
    """Lines, without those of the job's memory."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ({} if run.offloaded else {"OFFLOADD_DISABLE": "1"})
    done = programs.run(os.path.join(EXAMPLES, example), *arguments, "--pool", run.folder, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def model_folder(run):
    """A small model with a tokenizer for w0 … w99, and a text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = os.path.join(run.folder, "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                 eos_token_id=None)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i + 1 for i in range(100)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    with open(text := os.path.join(run.folder, "text"), "w", encoding="utf-8") as file:
        file.write(" ".join(f"w{i * i % 100}" for i in range(400)))
    return folder, text


@case(**ONE)
def plain_loop_and_what_it_generates(run):
    """The second run has no steps left, and generate.py reads the job."""
    folder, text = model_folder(run)
    arguments = (folder, text, "--ram", "128MiB", "--steps", "3", "--length", "16", "--lr", "1e-2")
    told = [line for line in said_by(run, "finetune_plain.py", *arguments) if line.startswith("step ")]
    assert len(told) == 3, told
    if run.offloaded:
        assert not any(line.startswith("step ") for line in said_by(run, "finetune_plain.py", *arguments))
        assert "after 3 steps" in said_by(run, "generate.py", folder, "w1 w4", "--ram", "128MiB", "--tokens", "4", "--job", "finetune")[-1]
    return told, said_by(run, "generate.py", folder, "w1 w4", "--ram", "128MiB", "--tokens", "4")[0]


@case(**ONE)
def trainer(run):
    folder, text = model_folder(run)
    lines = said_by(run, "finetune_hf.py", folder, text, "--ram", "128MiB", "--steps", "3", "--length", "16", "--out", os.path.join(run.folder, "out"))
    told = [line for line in lines if "grad_norm" in line]
    assert len(told) == 3, lines
    return told


@case(**ONE)
def configuration_of_deepspeed(run):
    return [line for line in said_by(run, "finetune_deepspeed_config.py", "--ram", "256MiB", "--steps", "3") if "loss" in line]


if __name__ == "__main__":
    programs = Programs()
    sys.exit(main())

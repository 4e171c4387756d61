"""Families of Hugging Face models, tiny: trained, saved, loaded, adapted, asked to generate."""

import contextlib
import glob
import json
import os
import subprocess
import sys

import torch

import offloadd
from battery import case, leave_out, main

try:
    import transformers
except ImportError:
    leave_out("transformers is not installed (tools/setup)")

FP32 = {"types": ("fp32",)}
IDS = 128


def tokens(step, size=2, length=10):
    return torch.randint(3, IDS, (size, length), generator=torch.Generator().manual_seed(step))


def language(step):
    return {"input_ids": tokens(step), "labels": tokens(step)}


def classes(step):
    return {"input_ids": tokens(step), "labels": torch.tensor([0, 1])}


def sequences(step):
    return {"input_ids": tokens(step), "labels": tokens(step + 50, length=6)}


def pictures(step):
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(step)), "labels": torch.tensor([0, 1])}


def sounds(step):
    return {"input_features": torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(step)), "labels": tokens(step, length=6)}


SMALL = {"vocab_size": IDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **options))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=IDS, n_embd=32, n_layer=2, n_head=4, n_positions=32,
                                                                 bos_token_id=1, eos_token_id=2))


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, max_position_embeddings=32))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=IDS, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4,
                                                                          decoder_start_token_id=0))


def qwen():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))


def gemma():
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8))


def opt():
    return transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=IDS, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
                                                               max_position_embeddings=32, word_embed_proj_dim=32))


def phi():
    return transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL, max_position_embeddings=32))


def falcon():
    return transformers.FalconForCausalLM(transformers.FalconConfig(vocab_size=IDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))


def roberta():
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL, max_position_embeddings=40))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                                                          num_attention_heads=4, image_size=16, patch_size=4, num_labels=3))


def whisper():
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        vocab_size=IDS, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=12, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1))


def family(build, batch, name, make=None, prepare=lambda m: None, **options):
    def function(run):
        model = run.make(build)
        model.config.use_cache = False
        prepare(model)
        batches = [batch(step) for step in range(3)]
        for each in batches:
            for key, value in each.items():
                if value.is_floating_point():
                    each[key] = value.to(run.dtype)
        return run.fit(model, batches, make)

    function.__name__ = name
    case(function, **options)


family(llama, language, "llama")
family(lambda: llama(tie_word_embeddings=True), language, "llama_tied")
family(llama, language, "llama_sgd", make=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
family(llama, language, "llama_eager", prepare=lambda m: m.set_attn_implementation("eager"), **FP32)
family(llama, language, "llama_checkpointing", prepare=lambda m: m.gradient_checkpointing_enable({"use_reentrant": False}))
family(llama, language, "llama_checkpointing_reentrant",
       prepare=lambda m: (m.gradient_checkpointing_enable({"use_reentrant": True}), m.enable_input_require_grads()))
family(gpt2, language, "gpt2")
family(bert, classes, "bert")
family(t5, sequences, "t5")
family(qwen, language, "qwen")
family(mixtral, language, "mixtral")
family(gemma, language, "gemma", **FP32)
family(opt, language, "opt", **FP32)
family(phi, language, "phi", **FP32)
family(falcon, language, "falcon", **FP32)
family(roberta, language, "roberta", **FP32)
family(vit, pictures, "vit")
family(whisper, sounds, "whisper")


# ---- Saving and loading ------------------------------------------------------------------------


def trained(run, build=llama):
    model = run.make(build)
    told = run.fit(model, [language(step) for step in range(2)])
    return model, told


@case
def save_pretrained(run):
    model, _ = trained(run)
    model.save_pretrained(folder := os.path.join(run.folder, "saved"))
    loaded = type(model).from_pretrained(folder, dtype=run.dtype)
    return dict(loaded.named_parameters()), loaded(**language(9)).loss


@case(**FP32)
def save_pretrained_in_shards(run):
    model, _ = trained(run)
    model.save_pretrained(folder := os.path.join(run.folder, "saved"), max_shard_size="20KB")
    return len(glob.glob(os.path.join(folder, "*.safetensors"))), dict(type(model).from_pretrained(folder).named_parameters())


@case(**FP32)
def save_pretrained_tied(run):
    model, _ = trained(run, lambda: llama(tie_word_embeddings=True))
    model.save_pretrained(folder := os.path.join(run.folder, "saved"))
    loaded = type(model).from_pretrained(folder)
    return dict(loaded.named_parameters()), loaded.lm_head.weight is loaded.model.embed_tokens.weight


@case(**FP32)
def save_pretrained_of_experts(run):
    model, _ = trained(run, mixtral)
    model.save_pretrained(folder := os.path.join(run.folder, "saved"))
    return dict(type(model).from_pretrained(folder).named_parameters())


@case
def from_pretrained_then_attach(run):
    run.make(llama).save_pretrained(folder := os.path.join(run.folder, "start"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=run.dtype)
    return run.fit(model, [language(step) for step in range(3)])


@case
def from_pretrained_inside_init(run):
    run.make(llama).save_pretrained(folder := os.path.join(run.folder, "start"))
    if not run.offloaded:
        return run.fit(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=run.dtype), [language(step) for step in range(2)])
    with offloadd.init(nvme_path=run.folder, ram="256MiB", job="born"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=run.dtype)
    return fit_attached(run, model)


@case
def from_config_inside_init(run):
    if not run.offloaded:
        return run.fit(run.make(llama), [language(step) for step in range(2)])
    torch.manual_seed(0)
    with offloadd.init(nvme_path=run.folder, ram="256MiB", job="born"):
        model = llama().to(run.dtype)
    return fit_attached(run, model)


LARGER_THAN_MEMORY = """
import gc, hashlib, json, os, sys, torch, transformers, offloadd
folder, ram = sys.argv[1:]

def kib(process, *names):
    with open(f"/proc/{process}/status", encoding="ascii") as file:
        said = dict(line.split(":", 1) for line in file)
    return sum(int(said[name].split()[0]) for name in names)

def train(model, steps, attach=lambda optimizer: None):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    handle, told = attach(optimizer), []
    for step in range(steps):
        ids = torch.randint(512, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return handle, told

config = transformers.AutoConfig.from_pretrained(folder)
config.num_hidden_layers = 1
train(transformers.LlamaForCausalLM(config), 1)  # which brings the framework to memory
gc.collect()
try:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak is that of now
    before = kib("self", "VmHWM")
except (OSError, KeyError):
    before = None
if ram:
    with offloadd.init(nvme_path=os.path.dirname(folder), ram=ram, job="larger"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
else:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
handle, told = train(model, 2, lambda optimizer: offloadd.attach(model, optimizer) if ram else None)
model.save_pretrained(saved := folder + "-saved", max_shard_size="16MB")
grown = None if before is None else (kib("self", "VmHWM") - before) << 10
daemon = kib(handle._engine.daemon_pid(), "RssAnon", "RssShmem") << 10 if ram else 0
digests = {}
for name in sorted(os.listdir(saved)):
    with open(os.path.join(saved, name), "rb") as file:
        digests[name] = hashlib.sha256(file.read()).hexdigest()
print(json.dumps([told, digests, grown, daemon]))
"""


@case(types=("fp32",), memory=("floor",))
def folder_larger_than_memory(run):
    """Is loaded, trained and saved with no more memory than `ram`, beside what the framework has and activations are."""
    config = transformers.LlamaConfig(vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=4,
                                      num_key_value_heads=4, max_position_embeddings=64)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder := os.path.join(run.folder, "model"), max_shard_size="16MB")
    size, ram = sum(p.nbytes for p in model.parameters()), 64 << 20
    assert size > ram
    del model
    done = subprocess.run([sys.executable, "-c", LARGER_THAN_MEMORY, folder, str(ram) if run.offloaded else ""], capture_output=True, text=True,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    told, digests, grown, daemon = json.loads(done.stdout.splitlines()[-1])
    if grown is None:
        print("skipped folder_larger_than_memory: /proc/self/clear_refs cannot be written, so there is no peak to look at")
    elif run.offloaded:
        activations = 32 << 20
        assert grown <= ram + activations and daemon <= ram, (grown, daemon)
    else:
        assert grown > 3 * size, grown  # gradients and moments, beside files that are mapped: the peak is one
    return told, digests


def fit_attached(run, model):
    attach, run.attach = run.attach, run.attach_constructed
    try:
        return run.fit(model, [language(step) for step in range(2)])
    finally:
        run.attach = attach


@case
def generate(run):
    model, _ = trained(run)
    model.eval()
    model.config.use_cache = True
    ids = tokens(3, size=1, length=4)
    torch.manual_seed(0)
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), \
        model.generate(ids, max_new_tokens=6, do_sample=True, top_k=5, pad_token_id=0), \
        model.generate(ids, max_new_tokens=4, num_beams=2, pad_token_id=0)


@case
def generate_without_an_optimizer(run):
    folder = os.path.join(run.folder, "hf")
    run.make(llama).save_pretrained(folder)
    with offloadd.init(nvme_path=run.folder, ram="64MiB", job="read") if run.offloaded else contextlib.nullcontext():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=run.dtype)
    told = []
    for _ in range(2):
        if run.offloaded:
            run.handles.append(offloadd.attach(model, **({} if not told else {"nvme_path": run.folder, "ram": "64MiB", "job": "read"})))
            assert run.handles[-1].plan()["state_bytes"] <= 2 * sum(p.numel() * p.element_size() for p in model.parameters())
        told.append(model.eval().generate(tokens(1), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0))
        if run.offloaded:
            run.handles.pop().close()
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=run.dtype)
    return told


@case(**FP32)
def embeddings_resized_before(run):
    model = run.make(llama)
    model.resize_token_embeddings(IDS + 8)
    return run.fit(model, [language(step) for step in range(2)])


# ---- PEFT --------------------------------------------------------------------------------------


@case(refused=1601, types=("fp32",), memory=("floor",))
def embeddings_resized_after_attach_are_refused(run):
    model, _ = trained(run)
    model.resize_token_embeddings(IDS + 8)


def with_adapters(run):
    import peft

    model = run.make(llama)
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False))


@case
def lora(run):
    model = with_adapters(run)
    told = run.fit(model, [language(step) for step in range(3)])
    if run.offloaded:
        base = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
        assert run.handles[0].update_count(base) == 0
    return told


@case(**FP32)
def lora_switched_off_and_merged(run):
    model = with_adapters(run)
    run.fit(model, [language(step) for step in range(2)])
    with torch.no_grad():
        on = model(**language(5)).loss
        with model.disable_adapter():
            off = model(**language(5)).loss
        merged = model.merge_and_unload()
        return on, off, merged(**language(5)).loss


@case(**FP32)
def lora_saved(run):
    import peft

    model = with_adapters(run)
    run.fit(model, [language(step) for step in range(2)])
    model.save_pretrained(folder := os.path.join(run.folder, "adapter"))
    again = peft.PeftModel.from_pretrained(run.make(llama), folder)
    return {name: p for name, p in again.named_parameters() if "lora" in name}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sys.exit(main())

"""Weights into and out of safetensors files, as a user does it: --init-from and --export of the example trainer.

usage: weights_io_test.py TRAIN OFFLOADD
"""

import filecmp
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import unittest

from trainer import Trainer

TRAIN, OFFLOADD = (os.path.abspath(path) for path in sys.argv[1:3])
RUN = ["--seq", "16", "--batch", "1", "--threads", "1", "--sample", "0", "--seed", "5", "--lr", "1e-3", "--warm-up", "0"]
SHAPE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 176, "vocab_size": 260, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}


def tensors_of(shape):
    """Names and shapes of a Llama, as Hugging Face has them."""
    hidden, inner, narrow = shape["hidden_size"], shape["intermediate_size"], shape["hidden_size"] // 2
    tensors = {"model.embed_tokens.weight": [shape["vocab_size"], hidden], "model.norm.weight": [hidden]}
    if not shape["tie_word_embeddings"]:
        tensors["lm_head.weight"] = [shape["vocab_size"], hidden]
    for layer in range(shape["num_hidden_layers"]):
        begin = f"model.layers.{layer}."
        for name, size in (("q", hidden), ("k", narrow), ("v", narrow), ("o", hidden)):
            tensors[f"{begin}self_attn.{name}_proj.weight"] = [size, hidden]
        for name, size in (("gate", [inner, hidden]), ("up", [inner, hidden]), ("down", [hidden, inner])):
            tensors[f"{begin}mlp.{name}_proj.weight"] = size
        tensors[begin + "input_layernorm.weight"] = tensors[begin + "post_attention_layernorm.weight"] = [hidden]
    return tensors


def count_of(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def rounded(value):
    """The bits of the bfloat16 nearest to a float32, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def pack(values, dtype):
    if dtype == "BF16":
        return struct.pack(f"<{len(values)}H", *map(rounded, values))
    return struct.pack(f"<{len(values)}{ {'F32': 'f', 'F16': 'e', 'F64': 'd'}[dtype]}", *values)


def random_weights(shape, seed=1):
    """Values that all three types hold after one rounding: name -> list."""
    source = random.Random(seed)
    return {name: [source.gauss(0, 0.05) for _ in range(count_of(size))] for name, size in tensors_of(shape).items()}


def layout(weights, shapes, dtype):
    """The header of a file and its data."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in weights.items():
        packed = pack(values, dtype)
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    return header, data


def write_file(path, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text) if length is None else length) + text + data)


def write_config(folder, shape):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(shape, file)


def write_checkpoint(folder, weights, shape=None, dtype="F32", shards=1):
    shape = shape or SHAPE
    write_config(folder, shape)
    names, shapes = list(weights), tensors_of(shape)
    if shards == 1:
        write_file(os.path.join(folder, "model.safetensors"), *layout(weights, shapes, dtype))
        return
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        index.update({name: file for name in names[shard::shards]})
        write_file(os.path.join(folder, file), *layout({name: weights[name] for name in names[shard::shards]}, shapes, dtype))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": index}, file)


def read_file(path):
    """name -> (dtype, shape, bytes); checks that the data is covered without hole or overlap."""
    with open(path, "rb") as file:
        raw = file.read()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        begin, stop = entry["data_offsets"]
        assert begin == end and stop - begin == count_of(entry["shape"]) * WIDTHS[entry["dtype"]], entry
        end = stop
    assert end == len(data)
    return {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def read_checkpoint(folder):
    tensors = {}
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    for file in files:
        tensors.update(read_file(os.path.join(folder, file)))
    if len(files) > 1:
        with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as file:
            index = json.load(file)
        assert set(index["weight_map"]) == set(tensors)
        assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    return tensors


class WeightsTest(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="weights-", dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(shutil.rmtree, self.root, True)
        self.pool = self.path("pool")
        os.mkdir(self.pool)

    def path(self, name):
        return os.path.join(self.root, name)

    def train(self, *arguments, offload="on", job="job", steps=3, code=0, environment=None):
        words = [*RUN, "--steps", str(steps), "--offload", offload, *arguments]
        if offload == "on":
            words += ["--ram", "64MiB", "--nvme-path", self.pool, "--job", job]
        run = Trainer(TRAIN, words, {"OFFLOADD_BINARY": OFFLOADD, **(environment or {})})
        self.assertEqual(run.wait(), code, run.stderr)
        return run

    def refused(self, identifier, *texts, folder=None, code=1, arguments=(), offload="on"):
        """A new job is refused, and leaves nothing."""
        source = [] if folder is None else ["--init-from", folder]
        run = self.train(*source, *arguments, code=code, job="new", offload=offload)
        for text in (identifier, *texts):
            self.assertIn(text, run.stderr)
        self.assertEqual([name for name in os.listdir(self.pool) if name.startswith("new")], [])

    def results(self, run):
        return [(line["loss"], line["grad_norm"]) for line in run.steps()]


class RoundTripTest(WeightsTest):
    def same(self, dtype, *flags):
        self.train(*flags, "--dtype", dtype, "--params", "300k", "--export", self.path("a"))
        arguments = ["--dtype", dtype, "--init-from", self.path("a")]
        offloaded = self.train(*arguments, "--export", self.path("on"), job="next")
        memory = self.train(*arguments, "--export", self.path("off"), offload="off")
        self.assertEqual(self.results(offloaded), self.results(memory))
        self.assertTrue(filecmp.cmp(self.path("on/model.safetensors"), self.path("off/model.safetensors"), shallow=False))
        self.assertTrue(filecmp.cmp(self.path("on/config.json"), self.path("a/config.json"), shallow=False))
        before, after = read_checkpoint(self.path("a")), read_checkpoint(self.path("on"))
        self.assertEqual(set(before), set(after))
        self.assertNotEqual(before, after)  # it was trained
        return before

    def test_export_starts_a_new_job_as_the_run_in_memory(self):
        self.same("fp32")

    def test_the_same_in_bf16_with_a_tied_matrix_written_once(self):
        tensors = self.same("bf16", "--tied")
        self.assertNotIn("lm_head.weight", tensors)
        self.assertEqual({dtype for dtype, _, _ in tensors.values()}, {"BF16"})

    def test_model_built_outside_of_memory_begins_with_the_same_weights(self):
        for dtype in ("fp32", "bf16"):
            for offload in ("on", "off"):
                folder = self.path(dtype + offload)
                self.train("--params", "2M", "--dtype", dtype, "--export", folder, offload=offload, job=dtype, steps=0)
            self.assertEqual(read_checkpoint(self.path(dtype + "on")), read_checkpoint(self.path(dtype + "off")))

    def test_shards_hold_what_the_single_file_holds(self):
        self.train("--params", "300k", "--export", self.path("one"))
        self.train("--export", self.path("many"), "--params", "300k", "--export-shard", "200kB")
        self.assertGreater(len(os.listdir(self.path("many"))), 4)
        self.assertEqual(read_checkpoint(self.path("one")), read_checkpoint(self.path("many")))

    def test_disabled_engine_reads_and_writes_the_same_files(self):
        write_checkpoint(self.path("in"), random_weights(SHAPE))
        for value in ("0", "1"):
            self.train("--init-from", self.path("in"), "--export", self.path(value), job=value, environment={"OFFLOADD_DISABLE": value})
        self.assertEqual(read_checkpoint(self.path("0")), read_checkpoint(self.path("1")))

    def test_types_are_converted_to_the_nearest(self):
        weights = random_weights(SHAPE)
        weights["model.norm.weight"][:4] = [1.00390625, 1.01171875, -1.00390625, 0.0]  # ties, either way
        for dtype, file_dtype in (("bf16", "F32"), ("bf16", "F16"), ("fp32", "F16"), ("fp32", "BF16"), ("fp32", "F32")):
            for offload in ("on", "off"):
                name = f"{dtype}-{file_dtype}-{offload}"
                source = self.path("in-" + file_dtype)
                write_checkpoint(source, weights, dtype=file_dtype, shards=3 if file_dtype == "F32" else 1)
                self.train("--init-from", source, "--dtype", dtype, "--export", self.path(name), offload=offload, job=name, steps=0)
                own = {"bf16": "BF16", "fp32": "F32"}[dtype]
                for tensor, (got_dtype, shape, data) in read_checkpoint(self.path(name)).items():
                    self.assertEqual((got_dtype, shape), (own, tensors_of(SHAPE)[tensor]))
                    packed = pack(weights[tensor], file_dtype)
                    if file_dtype == "BF16":
                        values = [struct.unpack("<f", b"\0\0" + packed[at : at + 2])[0] for at in range(0, len(packed), 2)]
                    else:
                        values = struct.unpack(f"<{len(weights[tensor])}{'f' if file_dtype == 'F32' else 'e'}", packed)
                    self.assertEqual(data, pack(values, own), name + " " + tensor)

    def test_old_tied_checkpoint_may_hold_the_output_matrix(self):
        tied = {**SHAPE, "tie_word_embeddings": True}
        weights = random_weights(SHAPE)
        write_config(self.path("in"), tied)
        write_file(self.path("in/model.safetensors"), *layout(weights, tensors_of(SHAPE), "F32"))
        self.train("--init-from", self.path("in"), steps=0)

    def test_file_itself_can_be_named(self):
        write_checkpoint(self.path("in"), random_weights(SHAPE))
        self.train("--init-from", self.path("in/model.safetensors"), steps=0)

    def test_job_that_exists_keeps_its_weights_and_says_so(self):
        write_checkpoint(self.path("in"), random_weights(SHAPE))
        self.train("--init-from", self.path("in"), "--export", self.path("before"))
        shutil.copytree(self.path("in"), self.path("other"))
        os.truncate(self.path("other/model.safetensors"), 100)  # is not even opened
        resumed = self.train("--init-from", self.path("other"), "--export", self.path("after"))
        self.assertEqual(resumed.start()["resumed_step"], 3)
        self.assertIn("keeps its weights", resumed.stderr)
        self.assertEqual(read_checkpoint(self.path("before")), read_checkpoint(self.path("after")))


class BadFileTest(WeightsTest):
    """What hostile and wrong files do to a new job; an old one in the same pool goes on."""

    def setUp(self):
        super().setUp()
        self.weights = random_weights(SHAPE)
        self.folder = self.path("in")
        self.file = self.path("in/model.safetensors")
        write_checkpoint(self.folder, self.weights)
        self.header, self.data = layout(self.weights, tensors_of(SHAPE), "F32")

    def bad(self, identifier, *texts, header=None, data=None, length=None):
        write_file(self.file, self.header if header is None else header, self.data if data is None else data, length)
        self.refused(identifier, *texts, folder=self.folder)

    def test_layouts_that_lie(self):
        self.train("--init-from", self.folder, steps=1)
        first, second = [entry for name, entry in self.header.items() if name != "__metadata__"][:2]
        begin, end = second["data_offsets"]
        second["data_offsets"] = [begin - 4, end - 4]
        self.bad("OFD-1401", self.file)
        second["data_offsets"] = [begin, end]
        first["data_offsets"] = [2**64 - 8, 8]
        self.bad("OFD-1401", self.file)
        first["data_offsets"] = [0, begin]
        self.bad("OFD-1401", self.file, data=self.data + b"tail")
        self.bad("OFD-1401", self.file, data=self.data[:-1])
        self.bad("OFD-1401", self.file, length=1 << 40)
        self.bad("OFD-1401", self.file, length=2**64 - 1)
        self.bad("OFD-1401", self.file, header=b'{"a": 1, "a": 2}', data=b"")
        self.bad("OFD-1401", self.file, header=b"[" * 1000, data=b"")
        write_file(self.file, b"", b"", length=0)
        os.truncate(self.file, 5)
        self.refused("OFD-1401", self.file, folder=self.folder)
        write_checkpoint(self.folder, self.weights)
        unharmed = self.train("--init-from", self.folder, steps=2)
        self.assertEqual(unharmed.start()["resumed_step"], 1)

    def test_tensors_that_are_not_the_model_s(self):
        name = "model.layers.1.mlp.up_proj.weight"
        shapes = tensors_of(SHAPE)
        self.bad("OFD-1402", name, header={**self.header, name: {**self.header[name], "shape": shapes[name][::-1]}})
        rest = {other: values for other, values in self.weights.items() if other != name}
        header, data = layout(rest, shapes, "F32")
        self.bad("OFD-1402", name, header=header, data=data)
        header, data = layout({**self.weights, "surplus": [1.0]}, {**shapes, "surplus": [1]}, "F32")
        self.bad("OFD-1402", "surplus", header=header, data=data)
        header, data = layout(self.weights, shapes, "F64")
        self.bad("OFD-1403", "F64", header=header, data=data)
        self.bad("OFD-1403", header={**self.header, name: {**self.header[name], "dtype": "Q9"}})

    def test_checkpoints_that_are_not_there(self):
        self.refused("OFD-1405", folder=self.path("none"))
        os.remove(self.file)
        self.refused("OFD-1405", folder=self.folder)
        write_checkpoint(self.folder, self.weights, shards=3)
        os.remove(self.path("in/model-00002-of-00003.safetensors"))
        self.refused("OFD-1405", "00002", folder=self.folder)

    def test_configurations_that_are_not_computed(self):
        write_config(self.folder, {**SHAPE, "rope_scaling": {"rope_type": "llama3"}})
        self.refused("OFD-1402", "rope_scaling", folder=self.folder)
        write_config(self.folder, {**SHAPE, "hidden_act": "gelu"})
        self.refused("OFD-1402", "hidden_act", folder=self.folder)
        write_config(self.folder, {**SHAPE, "intermediate_size": 160})
        self.refused("OFD-1402", "mlp", folder=self.folder)

    def test_flags_that_do_not_go_together(self):
        self.refused("OFD-1002", "only llama", folder=self.folder, arguments=["--model", "gpt2"], code=2)
        self.refused("OFD-1002", "only llama", arguments=["--model", "gpt2", "--export", self.path("out")], code=2)
        self.refused("OFD-1002", "--params", folder=self.folder, arguments=["--params", "1M"], code=2)

    def test_folder_that_holds_a_checkpoint_is_refused_before_training(self):
        self.refused("OFD-1404", self.folder, arguments=["--params", "100k", "--export", self.folder])
        self.refused("OFD-1404", self.folder, arguments=["--params", "100k", "--export", self.folder], offload="off")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)

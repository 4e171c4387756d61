"""What people do to a model and an optimizer beside training them: save, print, copy, look into, load."""

import collections
import contextlib
import copy
import ctypes
import gc
import io
import json
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import unittest.mock
import warnings
import zipfile
from multiprocessing.reduction import ForkingPickler

import numpy
import torch
from torch.optim import SGD, AdamW

import offloadd
from battery import VOCABULARY, WIDTH, Transformer, case, difference, main, own, saved
from offloadd import jobs

FP32 = {"types": ("fp32",)}


def started(run, steps=2, **options):
    """A model that was trained a little."""
    model = run.model(**options)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    run.train(model, optimizer, steps=steps)
    return model, optimizer


def served(look, name, **options):
    """A case that looks at the model after some steps, and trains on."""

    def function(run):
        model, optimizer = started(run)
        run.loss(model, 7).backward()
        told = look(model)
        return told, run.train(model, optimizer, first=2)

    function.__name__ = name
    case(function, **options)


first = lambda m: m.blocks[0].qkv.weight  # noqa: E731
served(lambda m: repr(first(m)), "repr_of_a_parameter")
served(lambda m: repr(first(m)[:2, :3]), "repr_of_a_view", **FP32)
served(lambda m: repr(first(m).t()), "repr_of_a_transposed", **FP32)
served(lambda m: repr(first(m) + 1), "repr_of_a_result", **FP32)
served(lambda m: repr(first(m).detach()), "repr_of_a_detached", **FP32)
served(lambda m: str(first(m).data), "str_of_data", **FP32)
served(lambda m: f"{first(m)[0, 0]:.4f} {first(m)}", "format", **FP32)
served(lambda m: repr(first(m).grad), "repr_of_a_gradient")
served(lambda m: repr(m), "repr_of_the_model", **FP32)
served(lambda m: first(m).tolist(), "tolist", **FP32)
served(lambda m: first(m)[0, :4].tolist(), "tolist_of_a_view", **FP32)
served(lambda m: first(m).grad.tolist(), "tolist_of_a_gradient", **FP32)
served(lambda m: first(m).detach().numpy().tolist(), "numpy", **FP32)
served(lambda m: first(m).data.numpy().sum().item(), "numpy_of_data", **FP32)
served(lambda m: first(m).detach().cpu().numpy().mean().item(), "numpy_of_cpu", **FP32)
served(lambda m: first(m).numpy(force=True).tolist(), "numpy_forced", **FP32)
served(lambda m: first(m).grad.numpy().tolist(), "numpy_of_a_gradient", **FP32)
served(lambda m: numpy.asarray(first(m).detach()).tolist(), "asarray", **FP32)
served(lambda m: numpy.linalg.norm(first(m).detach()).item(), "numpy_function", **FP32)
served(lambda m: (first(m)[0, 0].item(), float(first(m)[1, 1]), bool(first(m)[0, 0] > 0)), "item")
served(lambda m: [p.abs().max().item() for p in m.parameters()], "items")
served(lambda m: saved(m.state_dict()), "save_state_dict")
served(lambda m: saved(m.state_dict(), _use_new_zipfile_serialization=False), "save_state_dict_legacy", **FP32)
served(lambda m: saved({"model": m.state_dict(), "step": 3, "grads": [p.grad for p in m.parameters()]}), "save_checkpoint")
served(lambda m: saved(first(m)), "save_parameter", **FP32)
served(lambda m: saved(first(m)[1:3]), "save_view", **FP32)
served(lambda m: saved([p.detach() for p in m.parameters()]), "save_list", **FP32)
served(lambda m: dict(pickle.loads(pickle.dumps(m)).named_parameters()), "pickle_model")
served(lambda m: pickle.loads(pickle.dumps(first(m).detach())), "pickle_tensor", **FP32)
served(lambda m: pickle.loads(pickle.dumps(first(m).grad)), "pickle_gradient", **FP32)
served(lambda m: dict(copy.deepcopy(m).named_parameters()), "deepcopy_model")
served(lambda m: copy.deepcopy(m.state_dict()), "deepcopy_state_dict", **FP32)
served(lambda m: copy.deepcopy(first(m)), "deepcopy_parameter", **FP32)
served(lambda m: copy.copy(first(m)).shape, "copy_parameter", **FP32)


@case(**FP32)
def copied_parameter_has_its_attributes(run):
    model, optimizer = started(run)
    model.head.weight.mark = "kept"
    copied = copy.copy(model.head.weight)
    return run.train(model, optimizer, first=2), copied.detach().clone(), copied.mark, type(copied).__name__


served(lambda m: {k: v.cpu().clone() for k, v in m.state_dict().items()}, "state_dict_cloned")
served(lambda m: {k: (v.shape, str(v.dtype), v.device.type, v.stride()) for k, v in m.state_dict().items()}, "state_dict_shapes", **FP32)
served(lambda m: first(m).new_tensor([1.0, 2.0]), "new_tensor")
served(lambda m: first(m).new_zeros(3), "new_zeros", **FP32)
served(lambda m: (first(m).new_full((2,), 5.0), first(m).new_ones(2), first(m).new_empty(2).shape), "new_full", **FP32)
served(lambda m: first(m).new(2, 3).shape, "new", **FP32)
served(lambda m: first(m).grad.new_tensor([3.0]), "new_tensor_of_a_gradient", **FP32)
served(lambda m: (torch.zeros_like(first(m)), torch.ones_like(first(m).grad)), "zeros_like", **FP32)
served(lambda m: (first(m) == first(m)).all().item(), "comparison", **FP32)
served(lambda m: torch.allclose(first(m), first(m).clone()), "allclose", **FP32)
served(lambda m: torch.isnan(first(m)).any().item(), "isnan", **FP32)
served(lambda m: sum(p.numel() for p in m.parameters()), "numel", **FP32)
served(lambda m: sum(p.element_size() * p.nelement() for p in m.parameters()), "size_bytes", **FP32)
served(lambda m: torch.nn.utils.parameters_to_vector(m.blocks[0].parameters()), "parameters_to_vector", memory=("double",), **FP32)
served(lambda m: len({id(p) for p in m.parameters()} | {hash(first(m))}), "identity", **FP32)
served(lambda m: first(m).is_contiguous() and first(m).is_leaf and first(m).requires_grad, "questions", **FP32)
served(lambda m: first(m).untyped_storage().nbytes(), "storage_size", **FP32)
served(lambda m: torch.linalg.svdvals(first(m).float()), "svd", **FP32)
served(lambda m: torch.histc(first(m).detach().float(), 10), "histogram", **FP32)
served(lambda m: first(m).double().sum().item(), "cast", **FP32)
served(lambda m: (first(m) @ first(m).T).float().trace().item(), "product", **FP32)
served(lambda m: first(m).sum(0).argmax().item(), "reduction", **FP32)


@case
def saved_and_loaded_elsewhere(run):
    model, _ = started(run, tied=True)
    file = os.path.join(run.folder, "weights.pt")
    torch.save(model.state_dict(), file)
    other = Transformer(2, tied=True).to(run.dtype)
    other.load_state_dict(torch.load(file))
    return run.loss(other, 5), os.path.getsize(file) < 1.5 * sum(p.numel() * p.element_size() for p in model.parameters())


@case(**FP32)
def tied_weights_are_one_in_a_file(run):
    model, _ = started(run, tied=True)
    loaded = saved(model.state_dict())
    return loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()


@case
def saved_by_safetensors(run):
    from safetensors.torch import load_file, save_file

    model, optimizer = started(run)
    file = os.path.join(run.folder, "weights.safetensors")
    save_file(model.state_dict(), file)
    return load_file(file), run.train(model, optimizer)


class Mixed(torch.nn.Module):
    """Parameters of several types, one without elements, and buffers of most that safetensors knows."""

    def __init__(self):
        super().__init__()
        for type_name, shape in (("float32", (300, 70)), ("float64", (33,)), ("bfloat16", (64, 65)), ("float32", ())):
            self.register_parameter(f"{type_name}_of_{len(shape)}", torch.nn.Parameter(torch.randn(shape, dtype=getattr(torch, type_name))))
        self.frozen = torch.nn.Parameter(torch.randn(7, 3).half(), requires_grad=False)
        self.none = torch.nn.Parameter(torch.zeros(0, 3))
        for name in ("int8", "uint8", "int16", "int32", "int64", "uint16", "float8_e4m3fn", "float8_e5m2", "float16"):
            self.register_buffer(name, torch.arange(24, dtype=torch.uint8).view(getattr(torch, name)))
        self.bool, self.complex = (torch.nn.Buffer(torch.ones(3, dtype=each)) for each in (torch.bool, torch.complex64))

    def forward(self):
        return sum(p.float().square().sum() for p in self.parameters())


def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)


@case(**FP32)
def files_of_safetensors_are_those_of_plain_torch(run):
    """Byte by byte, whatever is in them beside what is offloaded, and so are the errors; what was there stays when one cannot be written."""
    import safetensors.torch

    torch.manual_seed(0)
    model = Mixed()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)
    run.attach(model, optimizer)
    run.steps(optimizer, lambda step: model(), steps=2)
    state = {**model.state_dict(), 'é "q\\ \n\x01\x7f\u2028': torch.ones(3), "gradient": torch.zeros(2, 3).t().contiguous()}
    weight, told = model.float32_of_2, []
    path = os.path.join(run.folder, "a.safetensors")
    for metadata in (None, {}, {"format": "pt"}, {'é"\n': "\x02"}):
        safetensors.torch.save_file(state, path, metadata=metadata)
        with open(path, "rb") as file:
            told += [file.read(), safetensors.torch.save(state, metadata)]
    for wrong in ({"t": weight.t()}, {"one": weight, "other": weight}, {"one": weight, "c": torch.ones(2, dtype=torch.complex128)},
                  {"one": weight, "s": torch.eye(3).to_sparse()}, {"one": weight, 1: weight}, {"one": weight, "n": 3}, {"one": weight, "\ud800": weight[:0]}):
        told += [error_of(lambda: safetensors.torch.save_file(wrong, path)), error_of(lambda: safetensors.torch.save(wrong))]
    for arguments in ((path + "/a",), (run.folder,), (b"a",), (path, {"a": 1})):
        kind, text = error_of(lambda: safetensors.torch.save_file({"one": weight}, *arguments))
        told.append((kind, text.replace(run.folder, "").split(".tmp")[0]))
    kept = os.path.getsize(path)
    if run.offloaded:
        with unittest.mock.patch("os.rename", side_effect=OSError(28, "No space left on device")):
            assert "No space left on device (os error 28)" in error_of(lambda: safetensors.torch.save_file({"one": weight}, path))[1]
    return told, kept == os.path.getsize(path), [name for name in os.listdir(run.folder) if "tmp" in name]


def allocated_bytes(function):
    """The most that torch has allocated meanwhile, and not freed."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        function()
    now = most = 0
    for event in sorted((each for each in profile.kineto_results.events() if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@case
def saved_one_weight_after_the_other(run):
    """No more than one copy at a time, and of a large weight one of a part."""
    import safetensors.torch

    model = run.make(lambda: torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(16)], torch.nn.Linear(1, 12 << 20, bias=False)))
    optimizer = SGD(model.parameters(), 1e-3)
    run.attach(model, optimizer)
    path, state = os.path.join(run.folder, "file"), model.state_dict()
    largest = model[-1].weight.nbytes
    for function, most in ((lambda: safetensors.torch.save_file(state, path), largest / 1.4),
                           (lambda: safetensors.torch.save(state), largest / 1.4),
                           (lambda: torch.save(state, path), largest + (2 << 20))):
        allocated = allocated_bytes(function)
        assert not run.offloaded or 0 < allocated < most, (allocated, most)
    return torch.load(path), os.path.getsize(path)


@case(**FP32)
def files_of_torch_save_are_those_of_plain_torch(run):
    """Byte by byte: tied weights, views, gradients, a tensor in two places; also in a file within another."""
    model, _ = started(run, tied=True)
    run.loss(model, 5).backward()
    weight, file, inner = model.head.weight, io.BytesIO(), io.BytesIO()

    class Within:
        def __reduce__(self):
            torch.save({"its": weight[1:3]}, inner)
            return str, (inner.getvalue().hex(),)

    torch.save({"state": model.state_dict(), "parts": [weight[2:4], weight.t(), weight], "gradient": weight.grad, "within": Within(),
                "after": model.norm.weight.detach()}, file)
    return file.getvalue(), inner.getvalue()


@case(**FP32)
def saved_tied_by_safetensors(run):
    from safetensors.torch import load_model, save_model

    model, _ = started(run, tied=True)
    file = os.path.join(run.folder, "weights.safetensors")
    save_model(model, file)
    other = Transformer(2, tied=True)
    load_model(other, file)
    return [p.detach() for p in other.parameters()]


@case(**FP32)
def loaded_by_safetensors(run):
    from safetensors.torch import load_model, save_model

    file = os.path.join(run.folder, "weights.safetensors")
    save_model(run.make(lambda: Transformer(2)), file)
    model, optimizer = started(run)
    load_model(model, file)
    return run.train(model, optimizer)


@case
def saved_by_the_handle(run):
    from safetensors.torch import load_file

    model, _ = started(run)
    if not run.offloaded:
        return {name: p.detach() for name, p in model.named_parameters()}
    folder = os.path.join(run.folder, "out")
    os.mkdir(folder)
    run.handles[0].save_weights(folder)
    loaded = load_file(os.path.join(folder, "model.safetensors"))
    return {name: loaded[name] for name, _ in model.named_parameters()}


@case(**FP32)
def mistakes_in_what_is_left_out_and_kept_are_refused(run):
    started(run)
    handle, told = run.handles[0], []
    for function in (lambda: handle.save_weights(os.path.join(run.folder, "out"), left_out=["nrom.weight"]),
                     lambda: handle.save_weights(os.path.join(run.folder, "out"), left_out="norm.weight"),
                     lambda: setattr(handle, "trainer_state", "text")):
        try:
            function()
        except offloadd.Error as error:
            told.append(str(error))
    assert len(told) == 3 and all("OFD-1002" in each for each in told), told
    return told


@case(**FP32)
def begun_with_weights_of_a_file(run):
    from safetensors.torch import save_model

    file = os.path.join(run.folder, "start.safetensors")
    with torch.random.fork_rng():
        torch.manual_seed(77)
        source = Transformer(2)
    save_model(source, file)
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    if run.offloaded:
        run.attach(model, optimizer, initial_weights=file)
    else:
        model.load_state_dict(source.state_dict())
        run.attach(model, optimizer)
    return run.train(model, optimizer)


def pickled_weights(run, name="pytorch_model.bin", **more):
    """A folder with the weights of another seed, as torch.save() writes them."""
    folder = os.path.join(run.folder, "pickled")
    os.mkdir(folder)
    with torch.random.fork_rng():
        torch.manual_seed(77)
        torch.save({**Transformer(2).state_dict(), **more}, os.path.join(folder, name))
    return folder


@case
def begun_with_weights_of_torch_save(run):
    folder = pickled_weights(run)
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    if run.offloaded:
        run.attach(model, optimizer, initial_weights=folder)
    else:
        run.attach(model, optimizer).load_weights(folder)
    return run.train(model, optimizer)


@case(**FP32)
def weights_of_torch_save_in_shards(run):
    model, optimizer = started(run)
    folder = os.path.join(run.folder, "shards")
    os.mkdir(folder)
    names = [name for name, _ in model.named_parameters()]
    files = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: torch.full_like(p, 0.01 * len(name)) for name, p in model.state_dict().items() if files[name] == file},
                   os.path.join(folder, file))
    with open(os.path.join(folder, "pytorch_model.bin.index.json"), "w", encoding="utf-8") as index:
        json.dump({"metadata": {}, "weight_map": files}, index)
    run.handles[0].load_weights(folder)
    return run.train(model, optimizer, first=2)


@case(**FP32)
def weights_come_and_go_in_memory_as_offloaded(run):
    model, optimizer = started(run)
    folder = os.path.join(run.folder, "kept")
    run.handles[0].save_weights(folder)
    told = [sorted(os.listdir(folder)), run.train(model, optimizer, first=2)]
    run.handles[0].load_weights(folder)
    return told, run.train(model, optimizer, first=4)


class Program:
    def __reduce__(self):
        return os.system, ("touch /nobody-runs-this",)


@case(refused=1401, types=("fp32",), memory=("floor",))
def program_in_a_file_is_not_run(run):
    folder = pickled_weights(run, more=Program())
    started(run)
    run.handles[0].load_weights(folder)


@case(refused=1402, types=("fp32",), memory=("floor",))
def weights_of_another_model_are_refused(run):
    folder = pickled_weights(run, stranger=torch.zeros(3))
    model = run.model()
    run.attach(model, AdamW(model.parameters(), 1e-3, fused=True), initial_weights=folder)


@case(types=("fp32",))
def arrays_that_are_kept_follow_the_steps(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    part, arrays, told = model.norm.bias.detach().numpy()[3:9], [], []
    for step in range(3):
        loss = run.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        arrays.append(model.head.weight.detach().numpy())
        told.append([part.tolist(), *(array[2].tolist() for array in arrays)])
    with torch.no_grad():
        model.head.weight.mul_(2)
    return told, model.head.weight.detach().numpy().tolist()


@case
def vector_that_is_kept_follows_the_steps(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    told, kept = [], []
    for step in range(4):
        loss = run.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append([loss.item(), *(vector.sum().item() for vector in kept)])
        if step < 2:
            kept.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach() * 0.99)
            torch.nn.utils.vector_to_parameters(kept[-1], model.parameters())
    return told


@case
def vector_that_is_written_without_a_step(run):
    """Parameters and vector are one memory, whichever is written, as evolution strategies do it."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    told = []
    for step in range(3):
        vector.add_(torch.randn(vector.numel(), generator=torch.Generator().manual_seed(step)).to(vector.dtype), alpha=0.01)
        told += [run.loss(model, step).item(), model.norm.bias.detach().clone()]
        with torch.no_grad():
            model.norm.bias.add_(0.125)
            model.head.weight[1:3] = 0.5
        told += [vector.clone(), *run.train(model, optimizer, steps=1, first=step), vector.clone()]
        torch.nn.utils.vector_to_parameters(vector, model.parameters())  # is no write
        told += run.train(model, optimizer, steps=1, first=step + 9)
        vector.data[step:9] = 0.25
        told.append({name: value.clone() for name, value in model.state_dict().items()})
    if vector.dtype == torch.float32:
        vector.numpy()[5] = 3.0  # no write that torch counts
    return told, model.blocks[0].qkv.weight.detach().clone(), run.train(model, optimizer, first=3)


@case(**FP32, refused=1601)
def vector_of_another_type_is_refused(run):
    """Torch's parameters become of its type."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach().double()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    told = [p.dtype for p in model.parameters()]
    run.train(model.float() if not run.offloaded else model, optimizer)
    return told


@case(**FP32)
def vector_that_is_written_while_other_threads_evaluate(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    end, errors = threading.Event(), []

    def evaluate():
        try:
            while not end.is_set():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sum()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=evaluate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(60):
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach() * 0.99
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        for _ in range(5):
            vector.mul_(1.001)
    end.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return vector, [p.detach().clone() for p in model.parameters()]


@case(types=("fp32",), memory=("double",))
def writing_into_numpy_is_refused(run):
    model, _ = started(run)
    array = model.head.weight.detach().numpy()
    if not run.offloaded:
        return "refused"
    try:
        array[0] = 1
    except ValueError:
        return "refused"
    return "written and lost"


@case(**FP32)
def arrays_of_other_functions_are_read_only(run):
    """What is written into numpy.asarray(p) would be lost; numpy.array(p), and one of another type, are copies in plain torch, too."""
    model, _ = started(run)
    weight = model.norm.bias.detach()
    for own in (numpy.array(weight), numpy.asarray(weight, dtype=numpy.float64)):
        own[0] = 1
    with torch.no_grad():
        told = model.norm.bias.numpy().tolist()
    if run.offloaded:
        try:
            numpy.asarray(weight)[0] = 1
            return "written and lost"
        except ValueError:
            pass
    return told, weight.tolist()


@case(types=("fp32",), memory=("floor",), refused=1603)
def model_that_was_shared_before_attach_is_refused(run):
    model = run.model()
    model.share_memory()
    run.attach(model, SGD(model.parameters(), 0.1))


@case(types=("fp32",), memory=("floor",))
def weights_of_a_mapped_file(run):
    """They are mapped privately."""
    torch.save(run.model().state_dict(), path := os.path.join(run.folder, "weights.pt"))
    model = run.model()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    return run.train(model, optimizer), torch.load(path)


def refused_access(look, name):
    def function(run):
        model = run.model()
        run.attach(model, SGD(model.parameters(), 0.1), raw_access="error")
        run.loss(model, 0).backward()
        try:
            look(model.head.weight)
        except offloadd.Error as error:
            assert "Engine::" not in str(error), error  # its way out is Python's
            raise

    function.__name__ = name
    case(function, refused=1603, types=("fp32",), memory=("floor",))


refused_access(lambda p: p.data_ptr(), "address_is_refused_on_request")
refused_access(lambda p: p.untyped_storage().data_ptr(), "address_of_a_storage_is_refused_on_request")
refused_access(lambda p: p.share_memory_(), "sharing_memory_is_refused_on_request")
refused_access(lambda p: numpy.from_dlpack(p.detach()), "dlpack_is_refused_on_request")
refused_access(lambda p: torch.to_dlpack(p.detach()), "capsule_of_dlpack_is_refused_on_request")
refused_access(lambda p: p.untyped_storage()[0], "byte_of_a_storage_is_refused_on_request")
refused_access(lambda p: p.untyped_storage().clone(), "copy_of_a_storage_is_refused_on_request")
refused_access(lambda p: p.storage()[0], "element_of_a_storage_is_refused_on_request")


def bytes_at(tensor):
    """What code of one's own sees behind a pointer."""
    return list(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())[:64])


served(lambda m: bytes_at(first(m)), "address", **FP32)
served(lambda m: bytes_at(first(m).grad), "address_of_a_gradient", **FP32)
served(lambda m: numpy.from_dlpack(first(m).detach()).tolist(), "dlpack", **FP32)
served(lambda m: ctypes.memset(first(m).data_ptr(), 0, 64) and 0, "written_through_an_address", **FP32)


# ---- The optimizer -----------------------------------------------------------------------------


@case
def optimizer_state(run):
    model, optimizer = started(run)
    return [{key: value for key, value in optimizer.state[p].items()} for p in model.parameters()] if run.dtype == torch.float32 else \
        [run.handles[0].gather(p, "exp_avg") for p in model.parameters()]


@case(**FP32)
def optimizer_state_of_momentum(run):
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.attach(model, optimizer)
    run.train(model, optimizer)
    return [optimizer.state[p]["momentum_buffer"] for p in model.parameters()], len(optimizer.state), model.head.weight in optimizer.state


@case(**FP32)
def optimizer_state_dict(run):
    _, optimizer = started(run)
    state = optimizer.state_dict()
    return state["state"], state["param_groups"]


@case(**FP32)
def optimizer_state_dict_in_a_file(run):
    _, optimizer = started(run)
    return saved(optimizer.state_dict())["state"]


@case(**FP32)
def state_of_an_optimizer_goes_into_memory(run):
    """A checkpoint is one for plain torch, too."""
    model, optimizer = started(run)
    state, weights = saved(optimizer.state_dict()), saved(model.state_dict())
    other = Transformer(2)
    plain = AdamW(other.parameters(), 1e-3, fused=True)
    other.load_state_dict(weights)
    plain.load_state_dict(state)
    return run.train(other, plain), [p.detach() for p in other.parameters()]


@case
def checkpoint_loaded_at_its_step(run):
    model, optimizer = started(run)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    told = run.train(model, optimizer, scheduler=scheduler)
    checkpoint = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    return told + run.train(model, optimizer, scheduler=scheduler, first=3)


@case(**FP32)
def fresh_state_dict_is_loaded(run):
    """What accelerate does when it prepares an optimizer."""
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    return run.train(model, optimizer)


@case
def optimizer_is_copied_and_pickled(run):
    _, optimizer = started(run)
    copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    return [isinstance(each, AdamW) and [list(state.values()) for state in each.state.values()] for each in (copied, pickled)]


@case(**FP32)
def optimizer_questions(run):
    _, optimizer = started(run)
    return repr(optimizer), isinstance(optimizer, torch.optim.Adam), optimizer.defaults["lr"], type(optimizer).__qualname__


# ---- The handle --------------------------------------------------------------------------------


@case
def gathered(run):
    model, _ = started(run)
    handle = run.handles[0]
    return handle.gather("blocks.0.qkv.weight"), handle.gather([model.head.weight, "norm.weight"]), \
        handle.gather(model.head.weight, "master"), handle.gather(model.head.weight, "exp_avg_sq"), offloadd.gather(model.head.weight), \
        list(offloadd.gather(model.norm.parameters()))


@case
def gathered_and_written(run):
    model, optimizer = started(run)
    with run.handles[0].gather([model.head.weight, model.norm.bias], write=True) as (weight, bias):
        weight.mul_(0.5)
        bias.fill_(0.25)
    with offloadd.gather([model.norm.weight], write=True) as (weight,):
        weight.zero_()
    return run.train(model, optimizer)


@case(types=("fp32",), memory=("floor",))
def texts_are_in_pythons_words(run):
    """Of a storage that was replaced behind the package's back, and of a model that was made in inference mode."""
    model, optimizer = started(run)
    with torch.inference_mode():
        other = torch.nn.Linear(4, 4)
    if run.offloaded:
        run.loss(model, 2).backward()
        replace, own_weight = torch._C.TensorBase.data.__set__, model.head.weight.detach()
        replace(model.head.weight, torch.ones_like(own_weight))
        for mistake in (optimizer.step, lambda: offloadd.attach(other, SGD(other.parameters(), 0.1), nvme_path=run.folder, ram="64MiB", job="other")):
            try:
                mistake()
                raise AssertionError("nothing was refused")
            except offloadd.Error as error:
                assert not any(word in str(error) for word in ("NoGradGuard", "set_data", "c10::", "torch::")), error
        replace(model.head.weight, own_weight)
    return "refused"


@case
def gathered_is_what_data_was_replaced_by(run):
    """Before a step, too."""
    model, _ = started(run)
    weight, handle = model.blocks[0].qkv.weight, run.handles[0]
    weight.data = weight.data * 0.37
    model.norm.bias.data = torch.full_like(model.norm.bias, 0.7)
    with offloadd.gather([weight], write=True) as (copied,):
        copied[0] += 1
    return handle.gather(weight), handle.gather("blocks.0.qkv.weight", "master"), handle.gather([model.norm.bias]), offloadd.gather(weight)


class Named(torch.nn.Parameter):
    """A class of somebody's own, without functions of its own."""


@case
def parameters_of_a_class_of_ones_own(run):
    model = run.model()
    model.norm.weight, model.norm.bias = Named(model.norm.weight.detach()), Named(model.norm.bias.detach())
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    told = [run.train(model, optimizer, steps=2), repr(model.norm.bias), model.norm.bias.tolist(), model.norm.bias[2:].detach().float().numpy().tolist()]
    for step in range(2, 5):
        model.norm.weight.data = model.norm.weight.data * 0.9
        model.norm.bias.data = torch.full_like(model.norm.bias, 0.1 * step)
        told += [run.train(model, optimizer, steps=1, first=step), type(model.norm.weight).__name__]
    return told, type(copy.deepcopy(model).norm.weight).__name__, saved(model.state_dict())


@case(refused=1002, types=("fp32",), memory=("floor",))
def unknown_name_is_refused(run):
    started(run)
    run.handles[0].gather("nonsense")


def mistaken(said, name, **options):
    """A case: what attach() says of an argument, beside its number."""

    @case(types=("fp32",), memory=("floor",))
    def function(run):
        if run.offloaded:
            model = run.model()
            try:
                offloadd.attach(**{"model": model, "optimizer": AdamW(model.parameters()), "nvme_path": run.folder, "ram": "64MiB", **options})
            except offloadd.Error as error:
                assert said in str(error) and "?." not in str(error), error
            else:
                raise AssertionError("no error")

    function.__name__ = name


mistaken("OFD-1002 nvme_path is 3, which is no path.", "number_as_nvme_path", nvme_path=3)
mistaken("OFD-1201 nvme_path is not set. Name a directory", "list_of_no_nvme_paths", nvme_path=[])
mistaken('OFD-1002 nvme_path "~/pool" begins with the ~ of shells', "tilde_of_shells", nvme_path="~/pool")
mistaken("OFD-1002 device is 'gpu0', which is no device of torch", "no_name_of_a_device", device="gpu0")
mistaken("OFD-1002 unfreeze names an int, which is no parameter.", "number_to_unfreeze", unfreeze=3)
mistaken("OFD-1604 attach() was given a list of no optimizers.", "list_of_no_optimizers", optimizer=[])
mistaken("OFD-1601 attach() was given no model.", "no_model", model=[], optimizer=None)
mistaken("has a comma with no path on one side of it. Leave it out", "comma_behind_nvme_path", nvme_path="/a,")
mistaken("OFD-1201 nvme_path is '/a\\x00/b', which has a NUL byte", "nul_in_nvme_path", nvme_path="/a\0/b")
mistaken('OFD-1002 job name "".', "empty_job_name", job="")
mistaken("names /a twice.", "nvme_path_twice", nvme_path="/a,/a")
mistaken('OFD-1002 "0.5" is not a size in bytes.', "share_as_ram", ram=0.5)
mistaken('OFD-1002 "True" is not a size in bytes.', "flag_as_ram", ram=True)
mistaken("OFD-1002 ram is 900.00 TiB, a job has", "ram_of_many_terabytes", ram="900TiB")
mistaken("OFD-1002 config is [1].", "list_as_config", config=[1])
mistaken("OFD-1002 there is no option nvme_pth. Did you mean nvme_path?", "typing_error_in_a_configuration", config={"nvme_pth": "/", "job": "typo"})
mistaken("OFD-1601 dict is no torch.nn.Module.", "state_dict_as_model", model={})
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # names are an experimental feature of torch
    mistaken("OFD-1601 the dimensions of parameter '0' have names, and such tensors are not offloaded. Make the parameter without", "names_of_dimensions",
             model=torch.nn.ParameterList([torch.zeros(2, 3, names=("rows", "columns"))]))
mistaken("OFD-1002 unfreeze: no parameter is called layers.*.", "names_to_unfreeze_that_are_none", unfreeze=["layers.*"])


@case(types=("fp32",), memory=("floor",))
def values_in_the_environment_that_mean_nothing_are_refused(run):
    if not run.offloaded:
        return
    for name, value, allowed in (("OFFLOADD_JOIN_TIMEOUT", "abc", "a number of seconds"), ("OFFLOADD_GPU_PEERS", "nonsense", "off, always"),
                                 ("OFFLOADD_READ_AHEAD", "x", "0, 1"), ("OFFLOADD_DISABLE", "false", "0, 1, true")):
        model = run.model()
        with unittest.mock.patch.dict(os.environ, {name: value}):
            try:
                offloadd.attach(model, AdamW(model.parameters()), nvme_path=run.folder, ram="64MiB")
            except offloadd.Error as error:
                assert error.id == 1002 and f'{name} is "{value}"' in str(error) and allowed in str(error), error
            else:
                raise AssertionError(name)


@case(refused=1002, types=("fp32",), memory=("floor",))
def unknown_option_is_refused(run):
    model = run.model()
    run.attach(model, AdamW(model.parameters()), nonsense=3)


@case(**FP32)
def figures(run):
    model, _ = started(run)
    handle = run.handles[0]
    if run.offloaded:
        assert handle.statistics()["bytes_written"] > 0 and "least ram" in str(handle.plan()) and handle.plan()["floor_bytes"] > 0
        assert set(map(type, handle.metrics().values())) == {float} and handle.metrics()["offloadd/step"] == 2.0
        assert offloadd.metrics() and repr(handle).endswith("at step 2>")
    return handle.step, handle.plan()["parameters"]


@case(**FP32)
def snapshot(run):
    model, optimizer = started(run)
    run.handles[0].snapshot("kept")
    if run.offloaded:
        from offloadd import control

        assert "kept" in control.run("snapshot", "ls", run.folder, run.handles[0].job)
    return run.train(model, optimizer)


@case(types=("fp32",), memory=("floor",))
def script_goes_to_another_directory(run):
    model, before = run.model(), os.getcwd()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    try:
        os.chdir(run.folder)
        handle = run.attach(model, optimizer, nvme_path=".")
        os.chdir(os.sep)
        told = run.train(model, optimizer)
        handle.snapshot("kept")
        told.append(run.weights())
        run.models.clear()
        if run.offloaded:
            handle.close()
            again = run.model()
            with run.attach(again, torch.optim.AdamW(again.parameters(), 1e-3, fused=True), job="job1", nvme_path=f" {run.folder} ") as resumed:
                assert resumed.step == 3
            run.models.clear()
        return told
    finally:
        os.chdir(before)


@case(types=("fp32",), memory=("floor",))
def trained_job_without_an_optimizer_is_told_of(run):
    model = run.model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    with run.attach(model, optimizer):
        told = run.train(model, optimizer)
    run.models.clear()
    if run.offloaded:
        try:
            run.attach(run.model(), None, job="job1")
            assert False
        except offloadd.Error as error:
            assert error.id == 1602 and "the optimizer that the job was trained with" in str(error), error
        run.models.clear()
    return told


@case
def exported_without_a_trainer(run):
    """offloadctl export, of a snapshot while the job goes on and of the last step after it."""
    import safetensors.torch

    def exported(job, *options):
        folder = os.path.join(run.folder, "export" + "".join(options))
        control.run("export", run.folder, job, folder, *options)
        return safetensors.torch.load_file(os.path.join(folder, "model.safetensors"))

    model, optimizer = started(run)
    handle, names = run.handles[0], [name for name, _ in model.named_parameters()]
    told = [list(handle.gather(names)), list(handle.gather(names, "master"))]
    handle.snapshot("kept")
    told += [run.train(model, optimizer, first=2), list(handle.gather(names)), list(handle.gather(names, "master"))]
    told += [[master.bfloat16() for master in told[-1]]]
    run.models.clear()
    if not run.offloaded:
        return told
    from offloadd import control

    files = [exported(handle.job, "--snapshot", "kept"), exported(handle.job, "--snapshot", "kept", "--dtype", "float32")]
    handle.close()
    files += [exported(handle.job), exported(handle.job, "--dtype", "float32"), exported(handle.job, "--dtype", "bfloat16")]
    assert all(sorted(file) == sorted(names) for file in files)
    files = [[file[name] for name in names] for file in files]
    return [*files[:2], told[2], *files[2:]]


class WithBuffers(torch.nn.Module):
    """Small ones and large ones of several types, and one that no file has."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(24, 48), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 4)
        self.register_buffer("mask", torch.rand(601, 1001) > 0.5)
        self.register_buffer("table", torch.randn(300, 701))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)

    def forward(self, x):
        self.seen += 1
        self.table[:4] += 1
        return self.last(self.norm(self.first(x)).relu())


@case(memory=("double",))
def exported_with_its_buffers(run):
    """What offloadctl writes is the whole state_dict: running statistics, counts, masks, also those that are tensors of the store."""
    import safetensors.torch

    model = run.make(WithBuffers)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    handle = run.attach(model, optimizer)
    for step in range(3):
        model(torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(run.dtype)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    told = dict(sorted((name, value.clone()) for name, value in model.state_dict().items()))
    run.models.clear()
    if not run.offloaded:
        return told
    from offloadd import control

    handle.close()
    control.run("export", run.folder, handle.job, os.path.join(run.folder, "out"))
    found = safetensors.torch.load_file(os.path.join(run.folder, "out", "model.safetensors"))
    run.make(WithBuffers).load_state_dict(found, strict=True)
    model = run.make(WithBuffers)
    with run.attach(model, AdamW(model.parameters(), 1e-3, fused=True), job="other") as other:
        other.load_weights(os.path.join(run.folder, "out"))
        assert difference(told, dict(sorted((name, value.clone()) for name, value in model.state_dict().items())), 0.0) is None
    run.models.clear()
    return dict(sorted(found.items()))


def tensors_under(folder):
    """{path: what torch loads of it} of every file of a universal checkpoint."""
    def value_of(held):
        held = held.get("param", held) if isinstance(held, dict) else held
        return held.clone() if isinstance(held, torch.Tensor) else held

    found = {}
    for parent, _, files in os.walk(folder):
        for file in files:
            if file.endswith(".pt"):
                path = os.path.join(parent, file)
                found[os.path.relpath(path, folder)] = value_of(torch.load(path, weights_only=True, mmap=True))
    return dict(sorted(found.items()))


def exported_as_universal(make, name, **options):
    """A case: what offloadctl writes of a closed job, of a snapshot, and what the handle writes are the same files."""

    def function(run):
        model = run.model()
        model.blocks[1].requires_grad_(False)
        optimizer = make(model.parameters())
        handle = run.attach(model, optimizer)
        told = run.train(model, optimizer, steps=2)
        handle.save_universal(os.path.join(run.folder, "handle"))
        own = tensors_under(os.path.join(run.folder, "handle", "global_step2_universal"))
        if not run.offloaded:
            run.models.clear()
            return told, own, run.train(model, optimizer, first=2)
        from offloadd import control

        handle.snapshot("kept")
        told = told, own, run.train(model, optimizer, first=2)
        handle.save_universal(os.path.join(run.folder, "later"))
        run.models.clear()
        handle.close()
        control.run("export", run.folder, handle.job, os.path.join(run.folder, "kept"), "--universal", "--snapshot", "kept")
        control.run("export", run.folder, handle.job, os.path.join(run.folder, "last"), "--universal")
        for there, here, step in (("handle", "kept", 2), ("later", "last", 5)):
            there, here = (os.path.join(run.folder, each) for each in (there, here))
            with open(os.path.join(there, "latest_universal")) as a, open(os.path.join(here, "latest_universal")) as b:
                assert a.read() == b.read() == f"global_step{step}_universal"
            expected, found = tensors_under(there), tensors_under(here)
            assert list(expected) == list(found), set(expected) ^ set(found)
            assert difference(expected, found, 0.0) is None, difference(expected, found, 0.0)
            assert found[f"global_step{step}_universal/mp_rank_00_model_states.pt"]["global_steps"] == step
            for path in found:  # torch does not look at the checksums
                with zipfile.ZipFile(os.path.join(here, path)) as archive:
                    assert archive.testzip() is None
        return told

    function.__name__ = name
    case(function, **options)


exported_as_universal(lambda p: AdamW(p, 1e-3, fused=True), "universal_by_offloadctl")
exported_as_universal(lambda p: torch.optim.RMSprop(p, 1e-3, centered=True, momentum=0.5), "universal_by_offloadctl_rmsprop", **FP32)


@case(**FP32)
def universal_by_offloadctl_goes_on(run):
    """Out of a closed job by offloadctl, into another by the handle."""
    model, optimizer = started(run)
    if run.offloaded:
        from offloadd import control

        run.models.clear()
        handle = run.handles.pop()
        handle.close()
        control.run("export", run.folder, handle.job, os.path.join(run.folder, "out"), "--universal")
        model = run.make(Transformer)
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        run.attach(model, optimizer).load_universal(os.path.join(run.folder, "out"))
    return run.train(model, optimizer, first=2)


@case(types=("fp32", "bf16", "fp64"))
def transposed_weights_are_rows_in_files(run):
    import safetensors.torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = torch.nn.Parameter((torch.randn(700, 500) * 0.05).t())
            self.small = torch.nn.Parameter((torch.randn(3, 4, 5)).permute(1, 2, 0))

        def forward(self, x):
            return torch.tanh(x @ self.wide) * self.small.sum()

    def train():
        for step in range(2):
            x = torch.randn(3, 500, generator=torch.Generator().manual_seed(step)).to(run.dtype)
            model(x).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = run.make(Net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=run.dtype == torch.float64)
    handle = run.attach(model, optimizer)
    train()
    folder = os.path.join(run.folder, "rows")
    handle.save_weights(folder)
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    files = [safetensors.torch.load_file(os.path.join(folder, "model.safetensors"))]
    train()
    told = [{name: p.detach().clone() for name, p in model.named_parameters()}, handle.gather(model.wide, "exp_avg")]
    handle.load_weights(folder)
    told += [{name: p.detach().clone() for name, p in model.named_parameters()}, [p.stride() for p in model.parameters()]]
    model_shape = model.wide.shape
    run.models.clear()
    if run.offloaded:
        from offloadd import control

        handle.wait_durable()
        handle.close()
        control.run("export", run.folder, handle.job, os.path.join(run.folder, "exported"))
        files.append(safetensors.torch.load_file(os.path.join(run.folder, "exported", "model.safetensors")))
        if run.dtype == torch.float64:  # which universal checkpoints do not hold
            assert all(torch.equal(files[-1][name], value) for name, value in saved.items())
            return told
        control.run("export", run.folder, handle.job, os.path.join(run.folder, "universal"), "--universal")
        universal = tensors_under(os.path.join(run.folder, "universal"))
        masters = {os.path.dirname(path).split("/")[-1]: value for path, value in universal.items() if path.endswith("fp32.pt")}
        files.append({name: value.to(run.dtype) for name, value in masters.items()})
        moment = next(value for path, value in universal.items() if path.endswith("wide/exp_avg.pt"))
        assert moment.shape == model_shape and torch.equal(moment, told[1])
    for file in files:
        assert all(torch.equal(file[name], value) for name, value in saved.items())
    return told


@case(**FP32)
def state_of_the_trainer(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    handle = run.attach(model, optimizer, **({"job": "state"} if run.offloaded else {}))
    told = [handle.trainer_state]
    handle.trainer_state = bytes(range(256))
    run.train(model, optimizer, steps=1)
    if run.offloaded:
        run.end()
        model = run.model()
        handle = run.attach(model, AdamW(model.parameters(), 1e-3, fused=True), job="state")
    return told + [handle.trainer_state, handle.step]


@case(**FP32)
def closed_by_with(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    with run.attach(model, optimizer):
        told = run.train(model, optimizer)
    run.handles.clear(), run.models.clear()
    return told


@case(**FP32)
def class_instead_of_an_instance(run):
    model = run.model()
    if run.offloaded:
        handle = offloadd.attach(model, AdamW, nvme_path=run.folder, ram="256MiB", lr=1e-3, fused=True)
        run.handles.append(handle)
        run.models.append(model)
        return run.train(model, handle.optimizer)
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    run.attach(model, optimizer)
    return run.train(model, optimizer)


@case
def constructed_larger_than_memory(run):
    if not run.offloaded:
        model = run.make(lambda: Transformer(2, tied=True))
    else:
        torch.manual_seed(0)
        with offloadd.init(nvme_path=run.folder, ram="256MiB", job="born"):
            model = Transformer(2, tied=True).to(run.dtype)
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach_constructed(model, optimizer)
    return run.train(model, optimizer)


def attached_otherwise_than_constructed(name, **options):
    """A case: attach() is given what init() was not; it is refused, and the job of init() can be taken all the same."""

    def function(run):
        with offloadd.init(nvme_path=run.folder, ram="256MiB", job="born"):
            model = Transformer(2)
        optimizer = SGD(model.parameters(), 0.1)
        try:
            offloadd.attach(model, optimizer, **options)
        finally:
            run.handles.append(offloadd.attach(model, optimizer, nvme_path=run.folder, ram="128MiB", job="born", weights_at_close="released"))
            assert run.handles[-1].job == "born" and run.handles[-1].statistics()["budget_bytes"] == 256 << 20

    function.__name__ = name
    case(function, refused=1002, types=("fp32",), memory=("floor",))


attached_otherwise_than_constructed("constructed_in_another_job", job="other")
attached_otherwise_than_constructed("constructed_in_another_pool", nvme_path="other")
attached_otherwise_than_constructed("constructed_and_closed_otherwise", weights_at_close="memory")


def constructed(name, build, **options):
    def function(run):
        torch.manual_seed(0)
        with offloadd.init(nvme_path=run.folder, ram="256MiB", job="born") if run.offloaded else contextlib.nullcontext():
            model = build(run)
        optimizer = SGD(model.parameters(), 0.1)
        run.attach_constructed(model, optimizer)
        def loss_of(step):
            return model(torch.randn(64, 160, generator=torch.Generator().manual_seed(step)).to(run.dtype)).float().square().mean()

        return run.steps(optimizer, loss_of, steps=2)

    function.__name__ = name
    case(function, memory=("256MiB",), **options)


def with_a_dry_run(run):
    model = torch.nn.Sequential(torch.nn.Linear(160, 1600), torch.nn.GELU(), torch.nn.Linear(1600, 160)).to(run.dtype)
    model(torch.ones(64, 160, dtype=run.dtype))
    return model


# Kernels that ask for empty tensors and write them, that take memory of their own, and set_().
constructed("constructed_with_weight_norm", lambda run: torch.nn.utils.weight_norm(torch.nn.Linear(160, 160)).to(run.dtype))
constructed("constructed_orthogonal", lambda run: torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(160, 160), orthogonal_map="cayley"),
            types=("fp32",))
constructed("constructed_with_a_dry_run", with_a_dry_run)


@case(memory=("256MiB",))
def constructed_and_used_before_it_is_attached(run):
    torch.manual_seed(0)
    with offloadd.init(nvme_path=run.folder, ram="256MiB", job="born") if run.offloaded else contextlib.nullcontext():
        model = with_a_dry_run(run)
        told = [model[0].weight.is_shared()]
    copied = copy.deepcopy(model).requires_grad_(False)
    told += [repr(model[0].weight), model[2].weight.tolist()[0], len(pickle.dumps(model.state_dict())) > 1 << 20]
    model.apply(lambda each: torch.nn.init.xavier_uniform_(each.weight) if isinstance(each, torch.nn.Linear) else None)
    optimizer = AdamW(model.parameters(), 1e-3)
    for step in range(4):
        if step == 2:
            run.attach_constructed(model, optimizer)
        if run.dtype != torch.float32 and step < 2:
            continue  # torch keeps no masters
        loss = model(torch.randn(8, 160, generator=torch.Generator().manual_seed(step)).to(run.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told, list(copied.parameters())


def cropped(run):
    model = torch.nn.Linear(160, 1600)
    model.weight = torch.nn.Parameter(model.weight[:800])
    model.bias = torch.nn.Parameter(model.bias[:800])
    return model


constructed("constructed_and_cropped", cropped, types=("fp32",))


def starting_with(look):
    def build(run):
        model = torch.nn.Sequential(torch.nn.Linear(160, 1600), torch.nn.GELU(), torch.nn.Linear(1600, 160)).to(run.dtype)
        with torch.no_grad():
            look(model[0].weight, model[2].weight)
        return model

    return build


# Kernels that have other operations make what they then read by its address.
constructed("constructed_with_a_mean", starting_with(lambda a, b: a.sub_(a.mean(0))))
constructed("constructed_with_a_mask", starting_with(lambda a, b: b.copy_(b * a[a > 0].mean())))
constructed("constructed_with_a_sorted_sample", starting_with(lambda a, b: a.div_(a.unique()[-1] * a.median())))
constructed("constructed_from_singular_values", starting_with(lambda a, b: a.copy_(a * torch.linalg.svd(a, full_matrices=False)[1])), types=("fp32",))
constructed("constructed_orthogonal_by_an_exponential",
            lambda run: torch.nn.Sequential(torch.nn.Linear(160, 600), torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(600, 600))),
            types=("fp32",))


@case(memory=("256MiB",))
def constructed_and_laid_out_larger_than_memory(run):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.Tanh(), torch.nn.Conv2d(64, 200, 3), torch.nn.Conv2d(200, 2, 1))
        return model.to(run.dtype).to(memory_format=torch.channels_last)

    options = {}
    if run.offloaded:
        options["job"] = "born"
        with offloadd.init(nvme_path=run.folder, ram="256MiB", job="born"):
            model = build()
    else:
        model = build()
    optimizer = AdamW(model.parameters(), 1e-2)
    run.attach(model, optimizer, **options)
    def loss_of(step):
        x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(step)).to(run.dtype)
        return model(x).float().pow(2).mean()

    told = run.steps(optimizer, loss_of)
    return told, [p.stride() for p in model.parameters()]


@case(types=("fp32",), memory=("double",))
def attached_again_as_in_a_notebook(run):
    """The cell is run again: names are bound anew, the handle last."""
    if not run.offloaded:
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        run.attach(model, optimizer)
        return run.train(model, optimizer) + run.train(model, optimizer, first=3)
    told, handle = [], None
    for first in (0, 3):
        model = run.model()
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        handle = offloadd.attach(model, optimizer, nvme_path=run.folder, ram="128MiB", job="notebook")
        assert handle.step == first
        told += run.train(model, optimizer, first=first)
    run.handles.append(handle)
    run.models.append(model)
    return told


@case(memory=("double",))
def constructed_again_as_in_a_notebook(run):
    """The cell that builds the model is run again, before anything has attached that: it gives way where nobody has it any more."""

    def build():
        torch.manual_seed(0)
        with offloadd.init(nvme_path=run.folder, ram="256MiB", job="born") if run.offloaded else contextlib.nullcontext():
            return Transformer(2, width=192).to(run.dtype)

    model = build()
    if run.offloaded:
        try:
            build()
            raise AssertionError("a second model")
        except offloadd.Error as error:
            assert error.id == 1002 and "drop it first (del model)" in str(error), error
    del model
    model = build()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach_constructed(model, optimizer)
    return run.train(model, optimizer)


@case(types=("fp32",), memory=("double",))
def jobs_end_with_their_models(run):
    def train():
        model = run.model(layers=1)
        optimizer = SGD(model.parameters(), 0.1)
        if run.offloaded:
            offloadd.attach(model, optimizer, nvme_path=run.folder, ram="128MiB", job="lost")
        return run.train(model, optimizer, steps=1), model

    told, model = train()
    told.append(run.loss(model, 3).item())  # handle and optimizer are gone, the model is not
    del model
    gc.collect()
    assert not offloadd.handles()
    return told


@case(**FP32)
def weights_that_outlive_their_model(run):
    """Models of several folds, of which something is kept: a state_dict(), a module, a parameter."""
    def train(fold, keep):
        torch.manual_seed(fold)
        model = Transformer(1).to(run.dtype)
        optimizer = SGD(model.parameters(), 0.1)
        if run.offloaded:
            offloadd.attach(model, optimizer, nvme_path=run.folder, ram="128MiB", job=f"fold{fold}")
        told.append(run.train(model, optimizer, steps=2))
        return keep(model)

    told = []
    gc.collect(), gc.collect()
    kept = [train(0, lambda m: m.state_dict()), train(1, lambda m: m.norm), train(2, lambda m: m.head.weight)]
    gc.collect()
    told += [own(kept[0]), copy.deepcopy(kept[0]), own(kept[1](torch.ones(2, WIDTH, dtype=run.dtype))), kept[2].sum().item()]
    kept.clear()
    gc.collect(), gc.collect()  # the handle is gone after the first
    assert not jobs.outlived
    return told


@case(**FP32)
def set_from_a_vector(run):
    model, optimizer = started(run)
    vector = torch.linspace(-0.1, 0.1, sum(p.numel() for p in model.blocks[0].parameters()))
    torch.nn.utils.vector_to_parameters(vector, model.blocks[0].parameters())
    return run.train(model, optimizer)


@case(**FP32)
def restored_plain_sgd(run):
    """What a search for the learning rate does."""
    model = run.model()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    told = run.train(model, optimizer)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return told + run.train(model, optimizer)


# ---- Threads and processes ---------------------------------------------------------------------


def refused_to_share(share, name):
    """With another process, whose writes would be lost; the model is as it was."""

    def function(run):
        model = run.model(layers=1)
        optimizer = AdamW(model.parameters(), 1e-3, fused=True)
        run.attach(model, optimizer)
        told = run.train(model, optimizer, steps=1)
        if run.offloaded:
            try:
                share(model)
                told.append("shared")
            except offloadd.Error as error:
                assert error.id == 1603, error
        return told + run.train(model, optimizer, steps=1, first=1)

    function.__name__ = name
    case(function, types=("fp32",), memory=("floor",))


refused_to_share(lambda model: model.share_memory(), "sharing_memory_is_refused")
refused_to_share(lambda model: ForkingPickler.dumps(model), "sending_to_another_process_is_refused")


@case(**FP32)
def loader_with_workers(run):
    data = torch.utils.data.TensorDataset(torch.arange(8 * 12).view(8, 12) % VOCABULARY)
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = []
    for _ in range(2):
        for (ids,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=1):
            loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
    return told


@case(**FP32)
def trained_in_a_thread(run):
    model = run.model()
    optimizer = AdamW(model.parameters(), 1e-3, fused=True)
    run.attach(model, optimizer)
    told = []
    thread = threading.Thread(target=lambda: told.extend(run.train(model, optimizer)))
    thread.start()
    thread.join()
    return told


@case(**FP32)
def fork_without_the_model(run):
    model, optimizer = started(run)
    child = os.fork()
    if child == 0:
        os._exit(3)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), run.train(model, optimizer)


def fork_is_refused(name, use):
    """A case: `use`(run, model) in a forked child is OFD-1802, and the parent trains on."""

    def function(run):
        model, optimizer = started(run)
        if not run.offloaded:
            return 2, run.train(model, optimizer)
        child = os.fork()
        if child == 0:
            try:
                use(run, model)
            except offloadd.Error as error:
                os._exit(2 if error.id == 1802 else 1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        return os.waitstatus_to_exitcode(status), run.train(model, optimizer)

    function.__name__ = name
    case(function, **FP32)


fork_is_refused("fork_that_uses_the_model", lambda run, model: run.loss(model, 0))
fork_is_refused("fork_that_overwrites_the_model", lambda run, model: model.head.weight.detach().zero_())  # looks at nothing first


def forked(act, seconds=60):
    """Begins act() in a forked child; what is returned waits for it, and is what act() has given. One that hangs is ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # those of OpenMP are the parent's
            signal.alarm(seconds)
            told = pickle.dumps(act())
            with open(writer, "wb") as file:
                file.write(told)
            os._exit(0)
        except BaseException as error:
            print(f"the child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    os.close(writer)

    def result():
        with open(reader, "rb") as file:
            told = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, f"the child ended with {code}"
        return pickle.loads(told)

    return result


def trained_by_adagrad(run, job, steps=3):
    """Not fused, so that much is sent to the daemon at once: the roots of torch's vector library."""
    model = run.model()
    optimizer = torch.optim.Adagrad(model.parameters(), 1e-2)
    handle = run.attach(model, optimizer, job=job)
    return handle, model, optimizer, run.train(model, optimizer, steps=steps)


@case(**FP32)
def forked_children_attach_after_the_parent_has_closed(run):
    _, _, _, told = trained_by_adagrad(run, "parent")
    run.end()

    def child():
        mine, _, _, losses = trained_by_adagrad(run, "child")
        mine.close()
        return losses

    return told, forked(child)()


@case(**FP32)
def forked_children_attach_while_their_parent_trains(run):
    """They must not be woken for each other's sockets, nor wait for threads that only the parent has."""
    _, model, optimizer, told = trained_by_adagrad(run, "parent")
    for n in range(3):

        def child(n=n):
            mine, own_model, _, losses = trained_by_adagrad(run, f"child{n}")
            losses.append(saved(own_model.state_dict()))
            mine.close()
            return losses

        result = forked(child)
        told += run.train(model, optimizer, steps=12)
        *_, losses = trained_by_adagrad(run, f"beside{n}")
        told += [losses, result()]
    return told


@case(**FP32)
def forked_children_use_what_is_of_their_parent(run):
    """Each way is refused at once, and names the way out; what needs no weights works."""
    model, optimizer = started(run)
    handle = run.handles[-1]
    uses = {
        "evaluate": lambda: run.loss(model, 0),
        "step": lambda: optimizer.step(),
        "state_dict": lambda: saved(model.state_dict()),
        "state": lambda: optimizer.state_dict(),
        "one state": lambda: optimizer.state[first(model)]["exp_avg"].sum().item(),
        "copy": lambda: copy.deepcopy(model),
        "gather": lambda: handle.gather(first(model)),
        "gather of all": lambda: offloadd.gather(list(model.parameters())),
        "plan": lambda: handle.plan(),
        "statistics": lambda: handle.statistics(),
        "status": lambda: handle.status(),
        "snapshot": lambda: handle.snapshot("kept"),
        "durable": lambda: handle.wait_durable(),
        "save": lambda: handle.save_weights(os.path.join(run.folder, "weights")),
    }
    if run.offloaded:
        for name, use in uses.items():

            def child(use=use):
                try:
                    use()
                except offloadd.Error as error:
                    return error.id, "spawn" in str(error)

            assert forked(child, 20)() == (1802, True), name
    told = forked(lambda: (repr(model), sum(p.numel() for p in model.parameters()), handle.close()))()
    return told[:2], run.train(model, optimizer)


@case(**FP32)
def forked_children_compute_without_the_model(run):
    model, optimizer = started(run)
    x, plain = torch.linspace(-1, 1, 64).view(8, 8), torch.nn.Linear(8, 8)

    def child():
        adam = torch.optim.Adam(plain.parameters(), 1e-2)
        for _ in range(3):
            adam.zero_grad()
            plain(x).square().mean().backward()
            adam.step()
        return saved(plain.state_dict())

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, n):
            return torch.full((4,), float(n)) @ torch.ones(4, 4)

    loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    told = [forked(child)()]
    for step in range(3):
        told += [batch.clone() for batch in loader] + run.train(model, optimizer, steps=1, first=step)
    return told


def _attached_anew(folder, ram):
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    optimizer = torch.optim.Adagrad(model.parameters(), 1e-2)
    with contextlib.nullcontext() if folder is None else offloadd.attach(model, optimizer, nvme_path=folder, ram=ram, job="spawned"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        return [p.tolist() for p in model.parameters()]


@case(**FP32)
def spawned_children_attach_while_their_parent_trains(run):
    model, optimizer = started(run)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        told = pool.apply_async(_attached_anew, (run.folder if run.offloaded else None, "64MiB"))
        losses = run.train(model, optimizer, steps=6)
        return losses, told.get(120)


def _processors_of_update_threads(daemon):
    named = [thread for thread in os.listdir(f"/proc/{daemon}/task") if open(f"/proc/{daemon}/task/{thread}/comm").read() == "update\n"]
    return [os.sched_getaffinity(int(thread)) for thread in named]


@case(**FP32)
def the_daemon_computes_where_any_thread_of_the_trainer_does(run):
    """Also where the one that attaches is bound, as OpenMP's first thread is."""
    own, done = os.sched_getaffinity(0), threading.Event()
    unbound = threading.Thread(target=done.wait)
    unbound.start()
    os.sched_setaffinity(0, {min(own)})
    try:
        model, optimizer = started(run)
        losses = run.train(model, optimizer)
        if run.offloaded:
            processors = _processors_of_update_threads(run.handles[0]._engine.daemon_pid())
            assert processors and all(its == own for its in processors), (processors, own)
    finally:
        os.sched_setaffinity(0, own)
        done.set()
        unbound.join()
    return losses


def _attached_until_the_end(folder, said):
    """Of a process that multiprocessing has made, which ends without what atexit has."""
    model = torch.nn.Linear(8, 32)
    optimizer = torch.optim.Adagrad(model.parameters(), 1e-2)
    kept = model, optimizer, offloadd.attach(model, optimizer, nvme_path=folder, ram="64MiB", job="forked")
    multiprocessing.util.Finalize(None, lambda: said.send(len(kept) - 3 + len(offloadd.handles())), exitpriority=-1)


@case(types=("fp32",), memory=("double",))
def processes_of_multiprocessing_close_their_job_at_their_end(run):
    if not run.offloaded:
        return 0, 0
    context = multiprocessing.get_context("fork")
    hears, said = context.Pipe(duplex=False)
    child = context.Process(target=_attached_until_the_end, args=(run.folder, said))
    child.start()
    said.close()
    child.join(120)
    return hears.recv(), child.exitcode


@case(**FP32)
def interrupt_in_forward(run):
    model, optimizer = started(run)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    try:
        run.loss(model, 0)
    except KeyboardInterrupt:
        handle.remove()
    return run.train(model, optimizer)


@case(types=("fp32",), memory=("floor",))
def long_work_tells_of_itself(run):
    """By a bar where somebody looks, by lines where nobody does, and not at all when it is short."""
    from offloadd import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    told, seconds = [], iter(range(0, 1000, 4))
    for stderr in (io.StringIO(), Terminal()):
        with contextlib.redirect_stderr(stderr):
            items = progress._lines([1, 2, 3, 4, 5, 6], "work", clock=lambda: next(seconds)) if not stderr.isatty() else progress.over([1, 2, 3], "work")
            told += [list(items), stderr.getvalue()]
    assert told[:2] == [[1, 2, 3, 4, 5, 6], "offloadd: work: 2 of 6\noffloadd: work: 5 of 6\n"], told
    assert told[2:] == [[1, 2, 3], ""], told
    return told


@case(**FP32)
def lists_and_dictionaries_of_weights(run):
    model, _ = started(run)
    by_size = collections.OrderedDict(sorted(((k, v.norm().item()) for k, v in model.state_dict().items()), key=lambda item: item[1]))
    return dict(by_size), [m.__class__.__name__ for m in model.modules()]


if __name__ == "__main__":
    sys.exit(main())

"""Arrays and buffers over the memory that parameters had before they were attached."""

import array
import ctypes
import gc
import os
import pickle
import sys
import tempfile
import warnings

import numpy
import safetensors.torch
import torch
from torch.optim import SGD, AdamW

import offloadd
from battery import Lines, case, main, saved
from offloadd import followers

FP32 = {"types": ("fp32",)}
SMALL = {"types": ("fp32",), "memory": ("floor",)}
Parameter = torch.nn.Parameter


def drawn(rows=4, seed=0):
    return numpy.random.RandomState(seed).randn(rows, 4).astype("float32")


def square(weight=None, requires_grad=True):
    """A layer with this weight."""
    layer = torch.nn.Linear(4, 4, bias=False)
    if weight is not None:
        layer.weight = Parameter(weight, requires_grad)
    return layer


def train(model, optimizer, first=0, steps=2):
    for step in range(first, first + steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for layer in model:
            x = torch.tanh(layer(x)) + x
        x.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def follows(name, build, look, **options):
    """`build`: (layers, what the program keeps); `look`: what it sees there."""

    def function(run):
        layers, kept = build()
        model = torch.nn.ModuleList(layers)
        optimizer = AdamW(model.parameters(), 1e-2, fused=True)
        run.attach(model, optimizer)
        told = [look(kept)]
        for step in range(3):
            train(model, optimizer, step, 1)
            told.append(look(kept))
        return told

    function.__name__ = name
    case(function, types=("fp32",), **options)


def numbers(kept):
    return [each.tolist() if hasattr(each, "tolist") else list(each) for each in kept]


def of_numpy():
    layer = square()
    whole = layer.weight.detach().numpy()
    return [layer, square()], [whole, whole[1:3, ::2], numpy.asarray(layer.weight.data)]


def of_state_dict():
    layers = [square(), square()]
    return layers, [value.cpu().numpy() for value in torch.nn.ModuleList(layers).state_dict().values()]


def of_from_numpy():
    whole, part, row = drawn(), drawn(8, 1), drawn(8, 2)
    layer = square()
    layer.weight.data = torch.as_tensor(row[4:])
    return [square(torch.from_numpy(whole)), square(torch.from_numpy(part[2:6])), layer], [whole, part, row[5]]


def of_transposed():
    one, other = drawn(), numpy.asfortranarray(drawn(seed=1))
    return [square(torch.from_numpy(one).t()), square(torch.asarray(other))], [one, other]


def parts_of_one_array():
    both = drawn(8)
    tensor = torch.from_numpy(both)
    return [square(tensor[:4]), square(tensor[4:])], [both]


def of_buffers():
    bytes_, numbers_, of_c, of_c_too = bytearray(drawn().tobytes()), array.array("f", range(16)), (ctypes.c_float * 16)(*range(16)), (ctypes.c_float * 16)()
    tensors = [torch.frombuffer(each, dtype=torch.float32).view(4, 4) for each in (bytes_, numbers_, of_c)]
    tensors.append(torch.from_numpy(numpy.ctypeslib.as_array(of_c_too)).view(4, 4))
    return [square(each) for each in tensors], [bytes_, numbers_, of_c, of_c_too]


def of_numpys_dlpack():
    whole = drawn()
    return [square(torch.from_dlpack(whole))], [whole]


def tensor_over_an_array():
    layer = square()
    return [layer], [torch.from_numpy(layer.weight.detach().numpy()).numpy()]


def of_tied():
    whole = drawn()
    layers = [square(torch.from_numpy(whole)), square()]
    layers[1].weight = layers[0].weight
    return layers, [whole, layers[1].weight.detach().numpy()]


for build in (of_numpy, of_state_dict, of_from_numpy, of_transposed, parts_of_one_array, of_buffers, of_numpys_dlpack, tensor_over_an_array, of_tied):
    follows(f"arrays_{build.__name__}_follow", build, numbers)


@case(**FP32)
def arrays_of_frozen_parameters_follow_what_is_written(run):
    whole = drawn()
    model = torch.nn.ModuleList([square(torch.from_numpy(whole), requires_grad=False), square()])
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    train(model, optimizer)
    told = [whole.tolist()]
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    train(model, optimizer)
    told.append(whole.tolist())
    model[0].weight.data.copy_(model[0].weight.detach() * 3)
    train(model, optimizer)
    told.append(whole.tolist())
    model[0].weight.requires_grad_(True)
    train(model, optimizer)
    return told, whole.tolist()


@case(**FP32)
def arrays_that_are_gone_are_forgotten(run):
    whole, layer = drawn(), square()
    model = torch.nn.ModuleList([square(torch.from_numpy(whole)), square(torch.from_numpy(drawn())), layer])
    kept = layer.weight.detach().numpy()
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    train(model, optimizer)
    counts = [len(followers._beneath)]
    del whole, kept
    train(model, optimizer)
    counts.append(len(followers._beneath))
    assert counts == ([2, 0] if run.offloaded else [0, 0]), counts


@case(**FP32)
def arrays_follow_a_job_that_goes_on(run):
    """From the beginning: the job has other weights than the model was made with."""
    def begin():
        whole, layer = drawn(), square(torch.ones(4, 4))
        model = torch.nn.ModuleList([square(torch.from_numpy(whole)), layer])
        optimizer = SGD(model.parameters(), 0.1)
        kept = layer.weight.detach().numpy()
        run.attach(model, optimizer, job="goes-on")
        return model, optimizer, whole, kept

    model, optimizer, whole, kept = begin()
    train(model, optimizer)
    told = [whole.tolist(), kept.tolist()]
    if run.offloaded:
        run.end()
        model, optimizer, whole, kept = begin()
        assert [whole.tolist(), kept.tolist()] == told
    train(model, optimizer, first=2)
    return told, whole.tolist(), kept.tolist()


@case(**SMALL)
def arrays_follow_after_an_attach_that_failed(run):
    layer, whole = square(), drawn()
    kept = layer.weight.detach().numpy()
    model = torch.nn.ModuleList([layer, square(torch.from_numpy(whole))])
    optimizer = SGD(model.parameters(), 0.1)
    if run.offloaded:
        try:
            offloadd.attach(model, optimizer, nvme_path=run.folder, ram="1KiB", job="small")
            raise AssertionError("attached")
        except RuntimeError as error:
            assert "OFD-1301" in str(error), error
        assert kept.flags.writeable and numpy.shares_memory(kept, layer.weight.detach().numpy())
    run.attach(model, optimizer)
    train(model, optimizer)
    return kept.tolist(), whole.tolist()


def given_later(name, change):
    """`change(model, step, kept)`: before a step, `p.data = …` with an array or a tensor that is kept."""

    def function(run):
        model = run.make(lambda: torch.nn.ModuleList([square(), square()]))
        optimizer, kept, told = AdamW(model.parameters(), 1e-2, fused=True), {}, []
        run.attach(model, optimizer)
        for step in range(4):
            change(model, step, kept)
            train(model, optimizer, step, 1)
            told.append({key: numpy.asarray(value).tolist() for key, value in kept.items()})
        return told

    function.__name__ = name
    case(function, types=("fp32",))


def _same_array_each_time(model, step, kept):
    flat = kept.setdefault("flat", numpy.ones(32, "float32"))
    flat[:] = 1 + step
    for n, layer in enumerate(model):
        layer.weight.data = torch.from_numpy(flat[16 * n:16 * n + 16].reshape(4, 4))


def _one_array(model, step, kept):
    if step == 1:
        kept["array"] = drawn()
        model[0].weight.data = torch.from_numpy(kept["array"])


def _other_memory_than_an_array(model, step, kept):
    if step == 0:
        kept["array"] = model[0].weight.detach().numpy()
    if step == 2:
        model[0].weight.data = model[0].weight.data * 0.5


def _put_back(model, step, kept):
    if step == 0:
        kept["array"] = model[0].weight.detach().numpy()
    if step == 2:
        own, model[0].weight.data = model[0].weight.data, torch.ones(4, 4)
        model[0](torch.ones(1, 4))
        model[0].weight.data = own


def _loaded(model, step, kept):
    if step == 1:
        kept.update(saved(torch.nn.ModuleList([square(torch.from_numpy(drawn())), square()]).state_dict()))
        for name, parameter in model.named_parameters():
            parameter.data = kept[name]


for change in (_same_array_each_time, _one_array, _other_memory_than_an_array, _put_back, _loaded):
    given_later(f"data_given{change.__name__}", change)


@case(**FP32)
def dictionaries_that_a_model_was_made_of_follow(run):
    model = run.make(lambda: torch.nn.ModuleList([square(), square(), square()]))
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    kept = safetensors.torch.load(safetensors.torch.save(own))
    model.load_state_dict(kept, assign=True)
    with tempfile.NamedTemporaryFile(dir=os.environ.get("TEST_TMPDIR"), suffix=".safetensors") as file:
        safetensors.torch.save_file(own, file.name)
        kept["1.weight"] = model[1].weight.data = safetensors.torch.load_file(file.name)["1.weight"]
    kept["2.weight"] = saved(own)["2.weight"]
    model[2].weight = Parameter(kept["2.weight"])
    optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    run.attach(model, optimizer)
    train(model, optimizer)
    kept["0.weight"].mul_(0.5)
    kept["2.weight"][1:3] = 1
    train(model, optimizer, 2)
    return sorted(kept.items()), model.state_dict()


def written(name, build, write, **options):
    def function(run):
        layers, kept = build()
        model = torch.nn.ModuleList(layers)
        optimizer = SGD(model.parameters(), 0.1)
        run.attach(model, optimizer)
        train(model, optimizer)
        write(kept)
        for layer in model:
            layer(torch.ones(2, 4))  # does not wait for a step
        told = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer)
        return told

    function.__name__ = name
    case(function, types=("fp32",), memory=("floor",), **options)


written("write_into_a_part_of_an_array_is_refused", of_numpy, lambda kept: kept[1].fill(1), refused=1601)
written("write_into_a_larger_array_is_refused", of_from_numpy, lambda kept: kept[1].fill(1), refused=1601)
written("write_beside_a_parameter_in_a_larger_array", of_from_numpy, lambda kept: kept[1][:2].fill(1))
written("write_into_a_bytearray_is_refused", of_buffers, lambda kept: kept[0].__setitem__(0, 1 - kept[0][0] // 255), refused=1601)


@case(**SMALL)
def traced_over_an_array(run):
    """Looking whether it was written is no part of the trace."""
    layers, kept = of_from_numpy()
    model = torch.nn.Sequential(*layers)
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    traced = torch.jit.trace(model, torch.ones(2, 4))
    train(model, optimizer)
    return traced(torch.ones(3, 4)).detach(), numbers(kept)


@case(**SMALL)
def compiled_over_an_array(run):
    """Without torch's warning of hooks."""
    layers, kept = of_from_numpy()
    model = torch.nn.Sequential(*layers)
    optimizer = SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Using `torch.compile")
        run.attach(model, optimizer)
        told = torch.compile(model, backend="eager")(torch.ones(3, 4)).detach()
    return told, numbers(kept)


@case(**SMALL)
def arrays_are_read_only_while_the_job_is_open(run):
    layer, whole = square(), drawn()
    kept = layer.weight.detach().numpy()
    model = torch.nn.ModuleList([layer, square(torch.from_numpy(whole))])
    run.attach(model, SGD(model.parameters(), 0.1))
    for each in (kept, whole) if run.offloaded else ():
        try:
            each[0] = 1
            raise AssertionError("written")
        except ValueError:
            pass
    run.end()
    whole[0] = 1


@case(**SMALL)
def arrays_follow_what_is_trained_after_close(run):
    """Those of numpy(), made before attach() and while the job is open; of others a line says that they do not."""
    first, second, third = square(), square(), square(torch.from_numpy(whole := drawn()))
    early = first.weight.detach().numpy()
    model = torch.nn.ModuleList([first, second, third])
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer, **({"weights_at_close": "memory"} if run.offloaded else {}))
    late, part = second.weight.detach().numpy(), second.weight.detach()[1:].numpy()
    train(model, optimizer)
    with Lines() as lines:
        run.end()
    assert [line for line in lines if "2 arrays or buffers" in line] or not run.offloaded, lines
    train(model, SGD(model.parameters(), 0.1))
    return early.tolist(), late.tolist(), [p.tolist() for p in model.parameters()], whole.shape, part.shape


@case(**SMALL)
def arrays_outlive_a_model_that_is_gone(run):
    whole, layer = drawn(), square()
    kept = layer.weight.detach().numpy()
    model = torch.nn.ModuleList([layer, square(torch.from_numpy(whole))])
    optimizer = SGD(model.parameters(), 0.1)
    run.attach(model, optimizer)
    train(model, optimizer)
    run.handles.clear()
    run.models.clear()
    del layer, model, optimizer
    gc.collect()
    told = kept.tolist(), whole.tolist()
    whole[0] = 1
    return told


@case(**SMALL)
def memory_that_cannot_be_written_is_told_of(run):
    """Where somebody has it who could look, and the parameter is trained."""
    fixed = [drawn(), drawn(), drawn()]
    for each in fixed:
        each.flags.writeable = False
    bytes_ = drawn().tobytes()
    tensors = [*map(torch.from_numpy, fixed), torch.frombuffer(bytes_, dtype=torch.float32).view(4, 4)]
    model = torch.nn.ModuleList(square(each, requires_grad=n != 1) for n, each in enumerate(tensors))
    del fixed[2], tensors, each
    with Lines() as lines:
        run.attach(model, SGD(model.parameters(), 0.1))
    if run.offloaded:
        assert [line.split()[2] for line in lines if "array or a buffer" in line] == ["0.weight", "3.weight"], lines
    return fixed[0].tolist(), len(bytes_)


def array_of_before(name, look, **options):
    def function(run):
        model = run.model()
        kept = look(model)
        run.attach(model, SGD(model.parameters(), 0.1))
        return kept

    function.__name__ = name
    case(function, types=("fp32",), memory=("floor",), **options)


def array_and_tensor(model):
    tensor = model.head.weight.detach()
    return tensor, tensor.numpy()


def two_of_one_array(model):
    whole = numpy.ones((48,), "float32")
    model.norm.weight, model.norm.bias = Parameter(torch.from_numpy(whole)), Parameter(torch.from_numpy(whole))


def of_a_file(model):
    file = tempfile.NamedTemporaryFile(dir=os.environ.get("TEST_TMPDIR"), suffix=".npy")
    numpy.save(file.name, numpy.ones((48,), "float32"))
    model.norm.weight = Parameter(torch.from_numpy(numpy.load(file.name, mmap_mode="r+")))
    return file.name


array_of_before("array_and_tensor_of_before_attach_are_refused", array_and_tensor, refused=1601)
array_of_before("two_parameters_of_one_array_are_refused", two_of_one_array, refused=1601)
array_of_before("parameter_over_a_file_is_refused", of_a_file, refused=1603)
array_of_before("dlpack_of_before_attach_is_refused", lambda m: torch.from_dlpack(m.norm.bias.detach()), refused=1601)
array_of_before("capsule_of_dlpack_of_before_attach_is_refused", lambda m: torch.from_dlpack(torch.to_dlpack(m.norm.bias.detach())), refused=1601)
array_of_before("dlpack_that_is_gone_before_attach", lambda m: torch.from_dlpack(m.norm.bias.detach()).sum().item())
array_of_before("copied_array_of_before_attach", lambda m: m.head.weight.detach().numpy().copy().tolist())
array_of_before("list_and_array_that_is_gone_before_attach", lambda m: m.head.weight.detach().numpy().sum().item())


@case(**SMALL)
def functions_that_make_tensors_of_arrays_are_torchs(run):
    """Under a default device, in scripts, and in pickles (a transform of data that other processes make)."""
    run.attach(model := torch.nn.ModuleList([square()]), SGD(model.parameters(), 0.1))
    for each in (torch.from_numpy, torch.as_tensor, torch.Tensor.numpy, torch.Tensor.tolist, torch.load, torch.nn.utils.vector_to_parameters):
        assert pickle.loads(pickle.dumps(each)) is each
    with torch.device("meta"):
        told = [torch.as_tensor([1.0]).device.type, torch.frombuffer(bytearray(4), dtype=torch.float32).device.type]
    return told, torch.jit.script(plus_one)(torch.ones(2)).tolist(), torch.as_tensor(data=[1.0]).tolist()


def plus_one(x: torch.Tensor):
    return x + torch.as_tensor(1.0)


if __name__ == "__main__":
    sys.exit(main())

"""What offloadd raises: one class, whose text begins with the identifier (OFD-nnnn) and ends with the way out."""

import re

# The library speaks of C++; here its sentences are Python's.
_WORDS = [
    ("Use a torch operation, or Engine::Gather() first", "Use a torch operation, or offloadd.gather(parameter)"),
    ("in the trainer and set options.gradients = \"reduced_by_trainer\"",
     "in the script with attach(…, gradients=\"reduced_by_trainer\")"),
    ("Register the same tensor under both names",
     "Register the same tensor under both names; where the model was changed after its optimizer was made (weight_norm, another Parameter over the same "
     "data), make the optimizer after that: what 'optimizer/…' names is in no module"),
    ("Use the model while its offload::Engine lives", "Use the model before handle.close(), or attach it again: the job continues at its last step"),
    ("Convert the module, module->to(torch::kFloat), before attaching it",
     "Convert the model before attach(): model.float() or model.to(torch.bfloat16)"),
    ("Register torch::view_as_real() of it as the parameter, and compute with torch::view_as_complex() of that; or keep it out of the module that "
     "is attached",
     "Make torch.view_as_real() of it the parameter, and compute with torch.view_as_complex() of that; or keep it out of the model that is attached"),
    ("requires_grad_(true)", "requires_grad_(True)"),
    ("or set may_thaw when a job is made over several pools", "or make the job with attach(…, unfreeze=True)"),
    ("make the job with options.may_thaw", "make the job with attach(…, unfreeze=True)"),
    ("belongs to another engine. Close that one before, opened with weights_at_close = memory, or give each engine models of its own",
     "belongs to another job. Close that one before, attached with weights_at_close=\"memory\"; give attach() all optimizers of the model at once; or "
     "give each job models of its own"),
    ("has its values in the job of an engine that is closed, a new job cannot begin with them. Open the first engine with weights_at_close = memory",
     "has its values in a job that is closed, a new job cannot begin with them. Leave that job open until attach(), attach it with "
     "weights_at_close=\"memory\""),
    ("or open it with weights_at_close = memory", "or attach with weights_at_close=\"memory\""),
    ("offload::Engine", "handle"),
    ("Attach it with AdamW() or SGD() first", "Call offloadd.attach(model, optimizer) first"),
    ("Lay it out anew before attaching the module, parameter.set_data(parameter.contiguous())",
     "Lay it out anew before attach(), parameter.data = parameter.contiguous()"),
    ("parameter.set_data(parameter.clone())", "parameter.data = parameter.clone()"),
    ("(set_, torch::load)", "(p.set_(…))"),
    ("replaced by other means than set_data() and set_() with its shape and type",
     "replaced by other means than p.data = x and p.set_(x) of its shape and type"),
    ("Give it values with copy_() under NoGradGuard, or with set_data()", "Give it values with p.copy_(x) under torch.no_grad()"),
    ("or lay the module out like that before attaching it", "or lay the model out like that before attach()"),
    ("Cast and replace tensors before attaching the module", "Change types and storages before attach(), and values with p.copy_()"),
    (" was not in the module when it was attached. Attach the module when it is complete, or register what comes later in an attached "
     "module that a shared_ptr holds before it is trained",
     " was not in the model when it was attached. Attach when the model is complete, or give what comes later to add_param_group()"),
    ("is sparse or of another shape or type. Give it the shape and type of its parameter",
     "is sparse, or of another shape or type. Make embeddings with sparse=False; a gradient has the shape and type of its parameter"),
    ("nvme_path is not set. Create the directory, or correct nvme_path", 'nvme_path is not set. Name a directory on a drive, nvme_path="/nvme0" or '
     "OFFLOADD_POOL"),
    ("Engine::Gather", "handle.gather"),
    ("LoadWeights()", "handle.load_weights()"),
    ("SaveWeights()", "handle.save_weights()"),
    ("LoadWeights", "handle.load_weights"),
    ("Attach the module of those that are new, with an optimizer, after zero_grad() and before the backward pass",
     "Call add_param_group() after zero_grad() and before the backward pass, when the model has what is new"),
    ("Use SGD, Lion or LAMB, or AdamW and Adam as AdamWFlavour::kFused, whose roots are the nearest; or attach an optimizer object of "
     "torch::optim, which then runs in this process",
     "Make the optimizer with fused=True, whose roots are the nearest, or train such parameters with one that is not attached"),
    ("Give each optimizer a module, or explicit groups, of its own", "Give each optimizer parameters of its own"),
    ("c10::InferenceMode", "torch.inference_mode()"),
    ("torch::NoGradGuard", "torch.no_grad()"),
    ("under NoGradGuard", "under torch.no_grad()"),
]
_NUMBER = re.compile(r"OFD-(\d{4})")


def in_python(text):
    for there, here in _WORDS:
        text = text.replace(there, here)
    return text


def class_of(value):
    """What an object is, in a text: "a Linear", "an Embedding", "an LSTM"."""
    name = type(value).__name__
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOaeio"
    return f"{'an' if name[0] in vowels else 'a'} {name}"


def error_id(error):
    """The number of an error's identifier: 1203 for OFD-1203, 0 when its text has none. For any exception."""
    found = _NUMBER.search(str(error))
    return int(found.group(1)) if found else 0


class Error(RuntimeError):
    """`id` is the number of the identifier, as `offloadctl explain` knows it."""

    def __init__(self, text=""):
        super().__init__(in_python(str(text)))

    @property
    def id(self):
        return error_id(self)

    @classmethod
    def of(cls, number, what, fix):
        return cls(f"OFD-{number} {what}. {fix}" + "." * (not fix.endswith("?")))

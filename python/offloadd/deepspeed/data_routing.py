"""deepspeed.runtime.data_pipeline.data_routing.helper, for programs that drop tokens at random only when they are told to."""

from .missing import refuse, refusing


def convert_to_random_ltd(model, convert_type):
    refuse("random layer token dropping (convert_to_random_ltd)", "Train without it: it changes which tokens a layer sees")


def save_without_random_ltd(model):
    """The state_dict of the model, or of an engine's, whose layers drop nothing."""
    return getattr(model, "module", model).state_dict()


__getattr__ = refusing("deepspeed.runtime.data_pipeline.data_routing.helper")
